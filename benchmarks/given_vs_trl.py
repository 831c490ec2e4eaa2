"""Training on given answers, DPO and SFT: Cohort against TRL at its best, with the same model, tokens and optimizer.

    PYTHONPATH=src python3 benchmarks/given_vs_trl.py --trl-pythonpath FOLDER --out given.json      # about 5 minutes
    ... --kinds dpo                        # DPO alone: about 150 s on an H200. SFT alone takes as long
    ... --kinds sft --compile              # tries torch.compile with TRL too: a minute or two more
    ... --only cohort                      # about 30 s per kind
    ... --kinds dpo --trl varlen:16:keep:bf16:liger      # this setting of TRL in place of a search
    python3 benchmarks/given_vs_trl.py --show given.json                                            # the tables again
    PYTHONPATH=src .venv-peers/bin/python benchmarks/given_vs_trl.py --device cpu --shape small     # 2 minutes, a CPU

Both sides load the same folder, which is written first: the config of the shape, random weights (normal, 0.02) and a
tokenizer with one word per token. They train on the same random tokens in the same order, with the same targets:

  dpo   Pairs with a prompt of 512 tokens and two answers of 128. A step includes the log-probabilities of a frozen
        reference; with "stored" they are computed before (`--reference stored`, TRL: `precompute_ref_log_probs`).
  sft   Documents of many lengths, packed into rows of exactly 4096 tokens. Every token but the first of a document is
        a target. TRL gets the packed rows as its own packing ("bfd", without padding) would make them.

A step is forward and backward pass, clipping and AdamW (betas 0.9 and 0.999, fp32 masters in Cohort). The first step of
a setting is not counted. Cohort's seconds have its packing in them; TRL's begin when its batch is collated.

TRL's settings are searched with half of a step, one timed step each, one choice after the other: rows per microbatch
(pairs or packed rows), attention, activations kept or computed twice, weights in bf16 or in fp32 under autocast,
kernels of Liger, and perhaps torch.compile. TRL 1.16 has no padding-free DPO and no Liger loss; its head computes
target tokens only, in chunks. No package of flash attention is needed: "varlen" is an attention function of this script
for transformers, which calls torch's flash kernels over the documents, as Cohort does. The fastest setting is measured
with whole steps, and with the other kind of weights too. A setting that fails is a line of the table.

Whether both do the same work is checked at the first step: number and sum of the target tokens must be equal, and loss,
gradient norm and log-probabilities of the answers equal up to rounding. "Of the peak" is the least time by arithmetic
at the measured rate of a large matrix product (`cohort.models.limits`), over the time that was taken. In DPO a prompt
counts once per pair, for TRL too.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from cpu_vs_trl import QUIET, make_clock
from sides import run_side, send_answer
from step_vs_trl import write_model

ROOT = Path(__file__).resolve().parents[1]
LR = 1e-5
BETA = 0.1
EOS = 1  # by the tokenizer of `write_model`
# Largest relative difference at the first step between the two sides, by number type.
TOLERANCE = {"bf16": {"loss": 5e-3, "grad_norm": 5e-2, "chosen": 3e-3, "rejected": 3e-3}}
TOLERANCE["fp32"] = dict.fromkeys(TOLERANCE["bf16"], 3e-4)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How TRL trains."""

    rows: int  # of a microbatch: pairs, or packed rows
    attention: str = "sdpa"  # or "varlen", or any other that transformers knows
    checkpointing: bool = False
    weights: str = "bf16"
    liger: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        marks = [
            *("checkpointing" if self.checkpointing else "keep", self.weights),
            *(["liger"] if self.liger else []),
            *(["compile"] if self.compiled else []),
        ]
        return ":".join([self.attention, str(self.rows), *marks])

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Returns the setting that a text such as "varlen:16:keep:bf16:liger" stands for."""
        attention, rows, *marks = text.split(":")
        return cls(
            rows=int(rows),
            attention=attention,
            checkpointing="checkpointing" in marks,
            weights="fp32" if "fp32" in marks else "bf16",
            liger="liger" in marks,
            compiled="compile" in marks,
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work that both sides do, and what the process of a side is to measure."""

    kind: str  # "dpo" or "sft"
    model: str
    vocab: int
    size: int  # pairs or packed rows of a step
    steps: int  # after the one that is not counted
    prompt: int = 512
    answer: int = 128
    row: int = 4096
    device: str = "cuda"
    stored: bool = False  # whether the reference's log-probabilities are computed before training
    budgets: tuple[int, ...] = (0,)  # Cohort: tokens per microbatch; 0 = what the memory plan says
    settings: tuple[str, ...] = ()  # TRL: those to measure; empty = a search
    compiles: bool = False  # whether the search tries torch.compile

    @property
    def num_tokens(self) -> int:
        """Tokens of a step, prompts once per answer."""
        return self.size * (self.row if self.kind == "sft" else 2 * (self.prompt + self.answer))


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """What a side trained on at its first step, and what came out of it."""

    targets: int  # number of target tokens
    total: int  # sum of their ids
    loss: float
    grad_norm: float
    chosen: float = 0.0  # DPO: mean log-probability of an answer
    rejected: float = 0.0


@dataclass(kw_only=True)
class Result:
    """The measurements of one setting of a side."""

    kind: str
    side: str
    setting: str
    numbers: str = "bf16"
    stored: bool = False
    tokens: int = 0  # of a step
    seconds: list[float] = field(default_factory=list)  # per counted step
    losses: list[float] = field(default_factory=list)  # per step, the first one too
    first: dict[str, float] = field(default_factory=dict)  # a `FirstStep`
    peak_gib: float = 0.0
    limit_seconds: float = 0.0  # least time by arithmetic; 0 = not computed
    rate: float = 0.0  # floating-point operations per second of a large product
    versions: dict[str, str] = field(default_factory=dict)
    failure: str = ""


# ---- the data --------------------------------------------------------------------------------------------------------

Pair = tuple[list[int], list[int], list[int]]
"""Prompt, better and worse answer. Answers end with EOS."""


def draw_tokens(rng: random.Random, vocab: int, num: int) -> list[int]:
    """Returns random token ids from 3, small ones more often, so that there is something to learn."""
    return [2 + int((vocab - 3) ** rng.random()) for _ in range(num)]


def draw_pairs(job: Job, step: int) -> list[Pair]:
    """Returns the pairs of a step."""
    rng = random.Random(step)
    lengths = (job.prompt, job.answer - 1, job.answer - 1)
    pairs = []
    for _ in range(job.size):
        prompt, chosen, rejected = (draw_tokens(rng, job.vocab, length) for length in lengths)
        pairs.append((prompt, [*chosen, EOS], [*rejected, EOS]))
    return pairs


def draw_rows(job: Job, step: int) -> list[list[list[int]]]:
    """Returns the packed rows of a step, each as its documents, which have exactly `job.row` tokens together."""
    rng = random.Random(step)
    rows = []
    for _ in range(job.size):
        documents: list[list[int]] = []
        room = job.row
        while room:
            length = min(room, rng.randint(job.row // 64, job.row // 2))
            # What would be left is too short for a document of its own.
            length = room if room - length < job.row // 64 else length
            documents.append(draw_tokens(rng, job.vocab, length))
            room -= length
        rows.append(documents)
    return rows


# ---- Cohort ----------------------------------------------------------------------------------------------------------


def measure_cohort(job: Job) -> Iterator[Result]:
    """Yields the measurements of Cohort, one per token budget and one with a stored reference."""
    import torch

    from cohort.models.files import load_folder

    dtype = torch.bfloat16 if job.device == "cuda" else torch.float32
    limit, rate = compute_limit(job, load_folder(job.model, dtype).decoder.to(job.device))
    jobs = [replace(job, budgets=(budget,), stored=False) for budget in job.budgets]
    for one in [*jobs, *([replace(jobs[0], stored=True)] if job.stored else [])]:
        free_memory(job.device)
        result = train_cohort(one, load_folder(job.model, dtype).decoder.to(job.device))
        result.rate = rate
        # Without the reference's forward pass there are three passes' worth of arithmetic, else four.
        result.limit_seconds = limit * (4 if job.kind == "dpo" and not one.stored else 3)
        yield result


def compute_limit(job: Job, decoder: Any) -> tuple[float, float]:
    """Returns the least seconds of one forward pass over a step, and the measured operations per second."""
    from cohort.models import limits

    shape = limits.BatchShape(prompts=job.size, samples=2, prompt_tokens=job.prompt, completion_tokens=job.answer)
    if job.kind == "sft":
        lengths = tuple(len(document) - 1 for row in draw_rows(job, 0) for document in row)
        # The first token of a document is its prompt.
        shape = limits.BatchShape(
            prompts=len(lengths), samples=1, prompt_tokens=1, completion_tokens=max(lengths), lengths=lengths
        )
    flops = limits.count_forward_flops(decoder.config, shape)
    dtype = decoder.embed.dtype
    on_gpu = decoder.embed.is_cuda
    rate = limits.measure_gpu_rates(dtype).flops if on_gpu else limits.measure_matmul_rate(dtype=dtype)
    return flops / rate, rate


def train_cohort(job: Job, decoder: Any) -> Result:
    """Trains `decoder` as `cohort train` does and returns what was measured."""
    import torch

    from cohort.algos.imitation import Imitation
    from cohort.algos.preferences import PreferenceLoss
    from cohort.config.preferences import Sigmoid
    from cohort.config.schema import LearnerConfig, OptimConfig
    from cohort.data.pack import make_batch
    from cohort.learner.local import LocalLearner
    from cohort.loops.dpo import make_pair_batch
    from cohort.loops.learning import annotate, store_logprobs, store_update
    from cohort.types import Provenance

    has_reference = job.kind == "dpo" and not job.stored
    learner = LocalLearner(
        decoder,
        LearnerConfig(token_budget=job.budgets[0]),
        OptimConfig(lr=LR),
        num_updates=job.steps + 1,
        reference=copy.deepcopy(decoder).requires_grad_(False) if has_reference else None,
    )
    steps = [make_groups(job, step) for step in range(job.steps + 1)]
    plan_memory(job, learner, max(count_tokens(group) for groups in steps for group in groups), has_reference)
    for groups in steps if job.stored else []:
        # Before training the policy is the reference.
        store_logprobs(groups, "ref_logprobs", learner.annotate(groups, {"old"}, Provenance.TARGET).old)
    loss = PreferenceLoss(Sigmoid(beta=BETA))
    result = Result(kind=job.kind, side="Cohort", setting=f"{learner.token_budget} tokens per microbatch")
    result.numbers = "bf16" if job.device == "cuda" else "fp32"
    result.stored, result.tokens = job.stored, job.num_tokens
    for groups in steps:
        wait_for(job.device)
        begin = time.perf_counter()
        if job.kind == "dpo":
            annotate(learner, groups, loss.needs(groups), Provenance.TARGET)
            update = learner.update(make_pair_batch(groups), loss)
        else:
            update = learner.update(make_batch(groups, loss_on=Provenance.TARGET), Imitation())
        store_update(groups, update)
        wait_for(job.device)
        result.seconds.append(time.perf_counter() - begin)
        result.losses.append(update.metrics["loss"])
        if groups is steps[0]:
            result.first = describe_first_step(groups, update.metrics)
    del result.seconds[0]
    result.peak_gib = measure_peak(job.device)
    result.versions = {"torch": torch.__version__}
    return result


def make_groups(job: Job, step: int) -> list[Any]:
    """Returns the examples of a step as Cohort has them: a document's first token is its prompt."""
    if job.kind == "dpo":
        return [
            make_group(f"{step}-{n}", prompt, answers) for n, (prompt, *answers) in enumerate(draw_pairs(job, step))
        ]
    documents = (document for row in draw_rows(job, step) for document in row)
    return [make_group(f"{step}-{n}", document[:1], [document[1:]]) for n, document in enumerate(documents)]


def make_group(id: str, prompt: list[int], answers: list[list[int]]) -> Any:
    """Returns a prompt with given answers, of which every token is a target."""
    from cohort.types import Group, Prompt, Provenance, Sample

    marks = [int(Provenance.PROMPT)] * len(prompt)
    return Group(
        prompt=Prompt(task="bench", id=id, visit=0, row={}, messages=[], tokens=prompt, provenance=marks),
        samples=[
            Sample(
                tokens=answer,
                provenance=[int(Provenance.TARGET)] * len(answer),
                sampler_logprobs=[0.0] * len(answer),
            )
            for answer in answers
        ],
    )


def count_tokens(group: Any) -> int:
    """Returns the tokens of a group in which every sample has a prompt of its own."""
    return sum(len(group.prompt.tokens) + len(sample.tokens) for sample in group.samples)


def plan_memory(job: Job, learner: Any, longest: int, has_reference: bool) -> None:
    """Applies the memory plan of a run to a learner on a GPU. The longest group has `longest` tokens."""
    from cohort.learner import plan
    from cohort.models.device import available_bytes

    device = learner.decoder.embed.device
    if device.type == "cuda":
        demand = plan.MemoryDemand(
            model=learner.decoder.config,
            bytes_per_number=learner.decoder.embed.itemsize,
            longest=longest,
            batch_tokens=job.num_tokens,
            kv_tokens=0,
            has_reference=has_reference,
        )
        learner.apply_plan(plan.plan_memory(demand, available_bytes(device), job.budgets[0]))
    learner.token_budget = max(learner.token_budget, longest)


def describe_first_step(groups: list[Any], metrics: dict[str, float]) -> dict[str, float]:
    """Returns a `FirstStep` of Cohort, as a dict."""
    from cohort.types import Provenance

    targets = [
        token
        for group in groups
        for sample in group.samples
        for token, mark in zip(sample.tokens, sample.provenance, strict=True)
        if mark == Provenance.TARGET
    ]
    return asdict(
        FirstStep(
            targets=len(targets),
            total=sum(targets),
            loss=metrics["loss"],
            grad_norm=metrics["grad_norm"],
            chosen=metrics.get("logprob/chosen", 0.0),
            rejected=metrics.get("logprob/rejected", 0.0),
        )
    )


# ---- TRL -------------------------------------------------------------------------------------------------------------


def measure_trl(job: Job) -> Iterator[Result]:
    """Yields the measurements of TRL: of the given settings, the first one with a stored reference too, or a search."""
    if not job.settings:
        yield from search(job)
        return
    settings = [Setting.parse(text) for text in job.settings]
    jobs = [(replace(job, stored=False), setting) for setting in settings]
    if job.stored:
        jobs.append((job, settings[0]))
    for one, setting in jobs:
        yield try_trl(one, setting)


def search(job: Job) -> Iterator[Result]:
    """Yields one measurement per setting of TRL that is tried: one choice after the other, with the best so far."""
    best = Setting(rows=1)
    fastest = math.inf
    # Liger changes modules of transformers for the whole process, so it is last.
    sizes = [2**n for n in range(7) if job.size >= 2**n and job.size % 2**n == 0]
    axes: list[list[dict[str, Any]]] = [
        [{"rows": size} for size in sizes[-3 if job.kind == "dpo" else -4 :]],
        [{"attention": "varlen"}],
        [{"checkpointing": True}],
        [{"weights": "fp32"}] if job.device == "cuda" else [],
        [{"liger": True}] if job.device == "cuda" else [],
        [{"compiled": True}] if job.compiles else [],
    ]
    # Packed rows are one row for transformers: without varlen their mask has a square of all tokens.
    best = replace(best, attention="varlen" if job.kind == "sft" else "sdpa")
    axes[1] = [{"attention": "sdpa", "rows": sizes[0]}] if job.kind == "sft" else axes[1]
    best = replace(best, weights="bf16" if job.device == "cuda" else "fp32")
    for axis in axes:
        found = []
        for changes in axis:
            setting = replace(best, **changes)
            result = try_trl(job, setting)
            yield result
            found.append((min(result.seconds, default=math.inf), setting))
        seconds, setting = min(found, key=lambda pair: pair[0], default=(math.inf, best))
        if seconds < fastest:
            best, fastest = setting, seconds


def try_trl(job: Job, setting: Setting) -> Result:
    """Returns the measurement of a setting of TRL. A failure is a part of it."""
    free_memory(job.device)
    result = Result(kind=job.kind, side="TRL", setting=str(setting), numbers=setting.weights, stored=job.stored)
    result.tokens = job.num_tokens
    try:
        train_trl(job, setting, result)
    # Whatever the libraries raise: the other settings are still to be measured.
    except Exception as error:
        result.seconds = []
        result.failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:200]
    return result


def train_trl(job: Job, setting: Setting, result: Result) -> None:
    """Trains with TRL and adds what was measured to `result`."""
    import torch
    import transformers
    import trl
    from torch.utils.data import SequentialSampler

    register_varlen()
    counted: list[tuple[Any, Any]] = []

    class Log(transformers.TrainerCallback):
        """Keeps the loss of every step, and what else is logged of the first."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            """Called after every step, and once at the end with a summary that has no loss."""
            if "loss" not in logs:
                return
            if not result.losses:
                total = [sum(int(part[n]) for part in counted) for n in (0, 1)]
                result.first = asdict(
                    FirstStep(
                        targets=total[0],
                        total=total[1],
                        loss=float(logs["loss"]),
                        grad_norm=float(logs["grad_norm"]),
                        chosen=float(logs.get("logps/chosen", 0.0)),
                        rejected=float(logs.get("logps/rejected", 0.0)),
                    )
                )
            result.losses.append(float(logs["loss"]))

    class Watched(trl.DPOTrainer if job.kind == "dpo" else trl.SFTTrainer):  # type: ignore[misc]
        """TRL's trainer, which takes the rows in their order and counts the targets of the first step."""

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            """Returns the rows in their order."""
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            """Returns TRL's loss. At the first step the targets are counted, without waiting for the GPU."""
            if self.state.global_step == 0:
                ids = inputs["input_ids"]
                mask = inputs["completion_mask"] == 1 if job.kind == "dpo" else inputs["labels"] != -100
                counted.append((mask.sum(), (ids * mask).sum()))
            return super().compute_loss(model, inputs, *args, **kwargs)

    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = Watched(
            model=job.model,
            args=make_trl_config(job, setting, folder),
            train_dataset=make_dataset(job),
            # Named explicitly: AutoTokenizer's class for the model would not use tokenizer.json unchanged.
            processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(job.model),
            callbacks=[make_clock(seconds, [], partial(wait_for, job.device)), Log()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    result.seconds = seconds[1:]
    result.peak_gib = measure_peak(job.device)
    result.versions = {"torch": torch.__version__, **{name: version(name) for name in ("transformers", "trl")}}


def make_dataset(job: Job) -> Any:
    """Returns the rows of all steps as TRL takes them: pairs as texts, or packed rows as tokens."""
    from datasets import Dataset

    steps = range(job.steps + 1)
    if job.kind == "sft":
        rows = [row for step in steps for row in draw_rows(job, step)]
        columns: dict[str, Any] = {
            "input_ids": [[token for document in row for token in document] for row in rows],
            "labels": [[label for document in row for label in [-100, *document[1:]]] for row in rows],
            "seq_lengths": [[len(document) for document in row] for row in rows],
        }
        return Dataset.from_dict(columns)
    pairs = [pair for step in steps for pair in draw_pairs(job, step)]
    prompts, chosen, rejected = zip(*pairs, strict=True)

    def spell(ids: list[int]) -> str:
        return " ".join(f"t{n}" for n in ids)

    # TRL appends the end of the sequence itself, and joins prompt and answer without a blank.
    answers = [[" " + spell(answer[:-1]) for answer in column] for column in (chosen, rejected)]
    return Dataset.from_dict({"prompt": [spell(p) for p in prompts], "chosen": answers[0], "rejected": answers[1]})


def make_trl_config(job: Job, setting: Setting, folder: str) -> Any:
    """Returns TRL's config. `folder` is its output folder."""
    import trl

    common: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": setting.rows,
        "gradient_accumulation_steps": job.size // setting.rows,
        "max_steps": job.steps + 1,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "use_cpu": job.device == "cpu",
        # Weights in bf16 need no autocast.
        "bf16": job.device == "cuda" and setting.weights == "fp32",
        "gradient_checkpointing": setting.checkpointing,
        "use_liger_kernel": setting.liger,
        "torch_compile": setting.compiled,
        "model_init_kwargs": {
            "dtype": "float32" if setting.weights == "fp32" else "bfloat16",
            "attn_implementation": setting.attention,
        },
        **QUIET,
    }
    if job.kind == "dpo":
        return trl.DPOConfig(**common, beta=BETA, max_length=None, precompute_ref_log_probs=job.stored)
    return trl.SFTConfig(
        **common,
        packing=True,
        packing_strategy="bfd",
        max_length=job.row,
        dataset_kwargs={"skip_prepare_dataset": True},
    )


def register_varlen() -> None:
    """Makes `attend_varlen` known to transformers as "varlen". Without a mask function there is no mask to build."""
    from transformers import AttentionInterface

    AttentionInterface.register("varlen", attend_varlen)


def attend_varlen(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    cu_seq_lens_q: Any = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Returns causal attention [B, L, H, D] inside each document, by torch's flash kernels. Nothing may be padded.

    query is [B, H, L, D]; key and value are [B, K, L, D]. The edges of the documents are `cu_seq_lens_q`, with a batch
    of one row; None = every row is a document.
    """
    import torch

    size, _, length, _ = query.shape
    edges = make_edges(size, length, query.device) if cu_seq_lens_q is None else cu_seq_lens_q
    longest = length if max_length_q is None else int(max_length_q)
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(dtype) for x in (query, key, value))
    if kind == "cuda":
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, edges, edges, longest, longest, 0.0, True, False, scale=scaling
        )[0]
    else:
        out = attend_each(q, k, v, edges.tolist(), scaling)
    return out.unflatten(0, (size, length)), None


@lru_cache(maxsize=4)
def make_edges(size: int, length: int, device: Any) -> Any:
    """Returns where `size` rows of equal length begin, laid end to end, and where the last one ends."""
    import torch

    return torch.arange(0, (size + 1) * length, length, dtype=torch.int32, device=device)


def attend_each(q: Any, k: Any, v: Any, edges: list[int], scaling: float | None) -> Any:
    """Returns causal attention [T, H, D] inside each document, one after the other: for CPUs, without flash kernels."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    parts = []
    for begin, end in pairwise(edges):
        queries, keys, values = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
        parts.append(mixed[0].transpose(0, 1))
    return torch.cat(parts)


# ---- both ------------------------------------------------------------------------------------------------------------


def wait_for(device: str) -> None:
    """Waits until a GPU has done its work."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Frees what is not used any more. On a GPU the peak is measured from here on."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure_peak(device: str) -> float:
    """Returns the most GiB that torch held on the GPU since `free_memory`; on a CPU the most of the whole process."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run_worker(side: str, job_file: str) -> None:
    """Measures one side in this process and sends what it measured."""
    values = json.loads(Path(job_file).read_text())
    job = Job(**values | {name: tuple(values[name]) for name in ("budgets", "settings")})
    for result in measure_cohort(job) if side == "cohort" else measure_trl(job):
        send_answer(asdict(result))


def find_differences(ours: Result, theirs: Result) -> list[str]:
    """Returns in what the first steps of two sides differ by more than rounding."""
    found = [
        f"{name}: {ours.first[name]:.0f} and {theirs.first[name]:.0f}"
        for name in ("targets", "total")
        if ours.first[name] != theirs.first[name]
    ]
    exact = ours.numbers == theirs.numbers == "fp32"
    for name, tolerance in TOLERANCE["fp32" if exact else "bf16"].items():
        one, other = ours.first[name], theirs.first[name]
        if abs(one - other) > tolerance * max(abs(one), 1e-3):
            found.append(f"{name}: {one:.6g} and {other:.6g}")
    return found


def compare_first_steps(results: list[Result]) -> list[str]:
    """Prints the first step of both sides. Returns in what measurements of TRL did other work than Cohort's."""
    wrong = []
    ours = next((r for r in results if r.side == "Cohort"), None)
    for theirs in results:
        if ours is None or theirs.side == "Cohort" or not theirs.first:
            continue
        one, other = (
            f"{r.first['targets']:.0f} targets, loss {r.first['loss']:.5f}, gradient {r.first['grad_norm']:.4f}"
            + (f", answers {r.first['chosen']:.2f} and {r.first['rejected']:.2f}" if r.kind == "dpo" else "")
            for r in (ours, theirs)
        )
        print(f"first step: Cohort {one}; TRL ({theirs.setting}) {other}")
        wrong += [f"{theirs.kind}, TRL ({theirs.setting}), {text}" for text in find_differences(ours, theirs)]
    return wrong


HEAD = ["", "setting", "step, s", "median, s", "tokens/s", "peak, GiB", "of the peak rate", "speed (TRL = 1)"]


def format_table(results: list[Result]) -> str:
    """Returns a Markdown table of measurements that did the same work. Speed is relative to the fastest of TRL."""
    limit = next((r.limit_seconds for r in results if r.limit_seconds), 0.0)
    fastest = min((min(r.seconds) for r in results if r.side == "TRL" and r.seconds), default=0.0)
    rows = [HEAD, ["---", "---", *["---:"] * (len(HEAD) - 2)]]
    for r in results:
        if not r.seconds:
            rows.append([r.side, r.setting, r.failure, *[""] * (len(HEAD) - 3)])
            continue
        step = min(r.seconds)
        cells = [r.side, r.setting, f"{step:.3f}", f"{statistics.median(r.seconds):.3f}", f"{r.tokens / step:.0f}"]
        share = f"{limit / step:.0%}" if limit else ""
        rows.append([*cells, f"{r.peak_gib:.1f}", share, f"{fastest / step:.2f}" if fastest else ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def format_search(results: list[Result]) -> str:
    """Returns a Markdown table of the search of TRL's settings, on a part of a step."""
    rows = [["setting", "tokens/s", "peak, GiB"], ["---", "---:", "---:"]]
    for r in results:
        speed = f"{r.tokens / min(r.seconds):.0f}" if r.seconds else r.failure
        rows.append([r.setting, speed, f"{r.peak_gib:.1f}" if r.seconds else ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def show(record: dict[str, Any]) -> None:
    """Prints the tables of a record. Then exits with an error if the two sides did different work."""
    print(record["machine"])
    wrong = []
    for kind, found in record["kinds"].items():
        results, tried = ([Result(**r) for r in found[name]] for name in ("results", "search"))
        for stored in (False, True):
            chosen = [r for r in results if r.stored == stored]
            if not chosen:
                continue
            print(f"\n{kind}{', reference stored' if stored else ''}: {record['work'][kind]}\n\n{format_table(chosen)}")
            wrong += compare_first_steps(chosen)
            for r in chosen:
                if r.losses:
                    print(f"losses of {r.side} ({r.setting}): {', '.join(f'{loss:.5f}' for loss in r.losses)}")
        if tried:
            print(f"\n{kind}, the search of TRL's settings\n\n{format_search(tried)}")
    if wrong:
        sys.exit("\n".join(["\nThe two sides did not train on the same:", *wrong]))


def describe_machine(device: str) -> str:
    """Returns date, hardware and versions in one line."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return f"{date.today()}, {name}, Python {platform.python_version()}, torch {torch.__version__}"


def compare_kind(job: Job, a: argparse.Namespace, keep: Callable[[list[Result], list[Result]], None]) -> None:
    """Measures both sides of a kind. `keep` is called with all results and those of the search after each of them."""
    results: list[Result] = []
    tried: list[Result] = []

    def measure(side: str, one: Job, path: str | None, into: list[Result]) -> None:
        for answer in run_side(__file__, side, one, path, seconds=a.seconds):
            into.append(Result(**answer))
            r = into[-1]
            shown = f"{min(r.seconds):.3f} s, {r.peak_gib:.1f} GiB" if r.seconds else r.failure
            print(f"{r.kind}, {r.side} ({r.setting}{', stored' if r.stored else ''}): {shown}", flush=True)
            keep(results, tried)

    if a.only != "trl":
        # What this process finds, that one finds too.
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        measure("cohort", job, path, results)
    if a.only == "cohort":
        return
    settings = tuple(a.trl)
    if not settings:
        measure("trl", replace(job, size=max(1, job.size // 2), steps=1, stored=False), a.trl_pythonpath, tried)
        ranked = sorted((r for r in tried if r.seconds), key=lambda r: min(r.seconds) / r.tokens)
        if not ranked:
            return
        best = Setting.parse(ranked[0].setting)
        # With fp32 weights under autocast TRL has masters, as Cohort has.
        other = replace(best, weights="fp32" if best.weights == "bf16" else "bf16")
        settings = (str(best), str(other)) if job.device == "cuda" else (str(best),)
    measure("trl", replace(job, settings=settings), a.trl_pythonpath, results)


def main(arguments: list[str]) -> None:
    """Writes the model, measures both sides of each kind, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help='"small" = two narrow layers, for a rehearsal')
    parser.add_argument("--kinds", nargs="+", choices=["dpo", "sft"], default=["dpo", "sft"])
    parser.add_argument("--only", choices=["cohort", "trl"])
    parser.add_argument("--trl", nargs="+", default=[], metavar="SETTING", help="settings to measure without a search")
    parser.add_argument("--trl-pythonpath", metavar="FOLDER", help="where TRL is, if not installed")
    parser.add_argument("--compile", action="store_true", help="let the search try torch.compile")
    parser.add_argument("--pairs", type=int, default=64, help="per step of DPO")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=32, help="packed rows per step of SFT")
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument(
        "--budgets", nargs="+", type=int, default=[0, 65536, 20480], help="Cohort: tokens per microbatch"
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which the process of a side is ended")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="JSON, written after every measurement")
    parser.add_argument(
        "--show", type=Path, metavar="JSON", help="print the tables of such a file, and measure nothing"
    )
    a = parser.parse_args(arguments)
    if a.show:
        show(json.loads(a.show.read_text()))
        return
    from cohort.models.shapes import find_shape

    config = find_shape("qwen2.5-0.5b" if a.shape == "small" else a.shape)
    if a.shape == "small":
        config = replace(config, vocab_size=2000, hidden=128, num_layers=2, num_heads=2, num_kv_heads=1, ff=256)
    record: dict[str, Any] = {"machine": describe_machine(a.device), "work": {}, "kinds": {}}
    with tempfile.TemporaryDirectory() as folder:
        write_model(config, Path(folder) / "model", a.device)
        for kind in a.kinds:
            job = Job(
                kind=kind,
                model=str(Path(folder) / "model"),
                vocab=config.vocab_size,
                size=a.pairs if kind == "dpo" else a.rows,
                steps=a.steps,
                prompt=a.prompt_tokens,
                answer=a.answer_tokens,
                row=a.row_tokens,
                device=a.device,
                stored=kind == "dpo",
                budgets=tuple(a.budgets),
                compiles=a.compile,
            )
            pairs = f"{a.pairs} pairs, prompts of {a.prompt_tokens} and answers of {a.answer_tokens} tokens"
            work = pairs if kind == "dpo" else f"{a.rows} packed rows of {a.row_tokens} tokens"
            record["work"][kind] = f"{a.shape}, {work} per step"

            def keep(results: list[Result], tried: list[Result], kind: str = kind) -> None:
                record["kinds"][kind] = {"results": list(map(asdict, results)), "search": list(map(asdict, tried))}
                if a.out:
                    a.out.write_text(json.dumps(record, indent=1) + "\n")

            compare_kind(job, a, keep)
    print()
    show(record)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(*sys.argv[2:])
    else:
        main(sys.argv[1:])
