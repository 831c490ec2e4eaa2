"""One GRPO step on a GPU, Cohort against TRL, with the same shape, prompts, lengths and reward, in bf16.

    PYTHONPATH=src python3 benchmarks/step_vs_trl.py --shape qwen2.5-0.5b --trl-pythonpath FOLDER --out step.json
    ... --trl vllm:64 vllm:64:keep:bf16 generate:64     # engine, samples per microbatch, activations kept, bf16 weights
    ... --trl vllm generate                             # each with the fastest setting of a search
    ... --only cohort

Both sides load the same folder, which is written first: the config of the shape, random weights (normal, 0.02) and a
tokenizer with one word per token. A step is: sample, score, advantages, forward and backward pass, AdamW step. Every
completion has exactly the requested length. The first step of a side is not counted; of the others the fastest counts.

TRL samples with vLLM in the same process ("colocate") or with Hugging Face's generate. It has no reference model. It
uses gradient checkpointing, except with "keep". Its weights are fp32 under bf16 autocast, as it loads them for
training; with "bf16" there are no fp32 weights. The search trains on a quarter of the prompts with invented
completions, because only the training depends on these settings. Peak memory is the largest that torch held, with
vLLM's share.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpu_vs_trl import Job as CpuJob
from cpu_vs_trl import Result as CpuResult
from cpu_vs_trl import make_trl_settings, run_cohort_step, run_trl
from sides import run_side, send_answer

if TYPE_CHECKING:
    from cohort.models.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
# Samples per microbatch that the search tries.
TRIED = (16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Job(CpuJob):
    """The work that both sides do. `microbatch` and the fields here, except `device`, are settings of TRL."""

    device: str = "cuda"
    # "vllm" or "generate".
    engine: str = "vllm"
    checkpointing: bool = True
    weights: str = "fp32"

    @property
    def setting(self) -> str:
        """The settings of TRL in words, without the engine."""
        kept = "checkpointing" if self.checkpointing else "activations kept"
        return f"{self.microbatch} samples per microbatch, {kept}, {self.weights} weights"


@dataclass(kw_only=True)
class Result(CpuResult):
    """The measurements of one side. `limit_seconds` is the least time of a step on this GPU; 0 = not computed."""

    peak_gib: float = 0.0
    limit_seconds: float = 0.0


# ---- Cohort -----------------------------------------------------------------------------------------------


def measure_cohort(job: Job) -> Result:
    """Measures Cohort, in the process of its side."""
    import torch

    from cohort.algos.algorithm import build_algorithm
    from cohort.config.schema import GRPO
    from cohort.engines.native import make_native_engine
    from cohort.inspect.bench import measure as bench
    from cohort.models import limits
    from cohort.models.files import load_folder

    dtype = torch.bfloat16 if job.device == "cuda" else torch.float32
    decoder = load_folder(job.model, dtype).decoder.to(job.device)
    shape = limits.BatchShape(
        prompts=len(job.ids),
        samples=job.samples,
        prompt_tokens=len(job.ids[0]),
        completion_tokens=job.completion_tokens,
    )
    limit = bench._compute_step_limit(decoder, shape)
    plan = bench._plan_memory(decoder, shape, 0, kv=True)
    learner = bench._make_learner(decoder, 0, True, plan)
    engine = make_native_engine(
        decoder,
        lambda ids: " ".join(map(str, ids)),
        slots=job.num_samples,
        max_context=len(job.ids[0]) + job.completion_tokens,
        reserve=0 if plan is None else plan.update,
    )
    algo = build_algorithm(GRPO(), job.completion_tokens)
    result = Result(side="Cohort", setting=f"{learner.token_budget} tokens per microbatch", limit_seconds=limit.seconds)
    bench._reset_peak_memory(decoder)
    # Step 0 is not counted.
    for n in range(job.steps + 1):
        seconds, sample_seconds = run_cohort_step(job, engine, learner, algo)
        if n:
            result.seconds.append(seconds)
            result.sample_seconds.append(sample_seconds)
    return result


# ---- TRL --------------------------------------------------------------------------------------------------


def measure_trl(job: Job) -> Result:
    """Measures TRL with the settings of the job, in the process of its side."""
    result = Result(side="TRL", setting=f"{job.engine}, {job.setting}")
    steps, sampling, _ = run_trl(replace(job, steps=job.steps + 1), make_trl_config)
    result.seconds, result.sample_seconds = steps[1:], sampling[1:]
    return result


def search_trl_settings(job: Job) -> Iterator[tuple[str, float]]:
    """Yields (setting, seconds of a step) for each setting of TRL. Infinite seconds = it does not fit into memory."""
    import torch

    part = len(job.ids) // 4
    small = replace(job, texts=job.texts[:part], ids=job.ids[:part], engine="generate", made_up=True, steps=1)
    # After a failure for lack of memory the next setting starts with an empty GPU.
    for size, kept, weights in product(TRIED, ("", "keep"), ("fp32", "bf16")):
        if size > small.num_samples:
            continue
        setting = ":".join(x for x in (str(size), kept, weights) if x)
        try:
            seconds = min(measure_trl(apply_setting(small, setting)).seconds)
        except torch.OutOfMemoryError:
            seconds = math.inf
        gc.collect()
        torch.cuda.empty_cache()
        yield setting, seconds


def apply_setting(job: Job, setting: str) -> Job:
    """Returns the job with a setting of TRL.

    "64:keep:bf16" = 64 samples per microbatch, activations kept, weights in bf16.
    """
    size, *rest = setting.split(":")
    return replace(
        job,
        microbatch=int(size),
        checkpointing="keep" not in rest,
        weights="bf16" if "bf16" in rest else "fp32",
    )


def make_trl_config(job: CpuJob, folder: str) -> Any:
    """Returns TRL's config for the engine and settings of the job. `folder` is its output folder."""
    import trl

    assert isinstance(job, Job)
    on_gpu = job.device == "cuda"
    length = job.completion_tokens
    engine: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": length}}
    if job.engine == "vllm":
        engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
            "generation_kwargs": {"ignore_eos": True, "min_tokens": length},
        }
    return trl.GRPOConfig(
        **make_trl_settings(job, folder),
        **engine,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=job.checkpointing,
        model_init_kwargs={"dtype": "bfloat16" if job.weights == "bf16" else "float32"},
    )


# ---- both -------------------------------------------------------------------------------------------------


def write_model(config: ModelConfig, folder: Path, device: str) -> None:
    """Writes random weights and a tokenizer that spells token n as "tn"."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from cohort.models.files import save_folder
    from cohort.models.shapes import make_random_decoder

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    save_folder(make_random_decoder(config, dtype, device), None, None, folder)
    # The three special tokens have the ids 0, 1 and 2. `make_prompts` leaves them out.
    special = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<pad>"}
    names = [*special.values(), *(f"t{n}" for n in range(len(special), config.vocab_size))]
    words = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    fast.save_pretrained(folder)


def make_prompts(vocab: int, num: int, length: int) -> list[list[int]]:
    """Returns `num` prompts of `length` random token ids. The ids below 3 are special tokens and do not occur."""
    rng = random.Random(0)
    return [[rng.randrange(3, vocab) for _ in range(length)] for _ in range(num)]


def run_worker(side: str, job_file: str) -> None:
    """Measures one side ("cohort", "trl" or "search") in this process and sends what it measured."""
    job = Job(**json.loads(Path(job_file).read_text()))
    if side == "search":
        for setting_and_seconds in search_trl_settings(job):
            send_answer(setting_and_seconds)
        return
    result = measure_cohort(job) if side == "cohort" else measure_trl(job)
    if job.device == "cuda":
        import torch

        result.peak_gib = torch.cuda.max_memory_allocated() / 2**30
    packages = ["torch"] if side == "cohort" else ["torch", "transformers", "trl"]
    if side == "trl" and job.engine == "vllm":
        packages.append("vllm")
    result.versions = {name: version(name) for name in packages}
    send_answer(asdict(result))


def measure_in_process(side: str, job: Job, path: str | None) -> Result | None:
    """Measures one side in its own process and prints the result. Returns None if the process fails."""
    for answer in run_side(__file__, side, job, path):
        result = Result(**answer)
        print(format_result(result), flush=True)
        return result
    return None


def rank_trl_settings(job: Job, path: str | None) -> list[str]:
    """Returns the settings of TRL that fit into memory, the fastest first."""
    seconds = {}
    for setting, taken in run_side(__file__, "search", job, path):
        seconds[setting] = taken
        print(f"TRL, {setting}: {taken:.2f} s to train on a quarter of the batch", flush=True)
    return sorted((s for s, taken in seconds.items() if taken < math.inf), key=seconds.__getitem__)


def format_result(r: Result) -> str:
    """Returns one result as a line of text."""
    step = min(r.seconds)
    sampling = min(r.sample_seconds)
    return f"{r.side} ({r.setting}): step {step:.2f} s, sampling {sampling:.2f} s, {r.peak_gib:.1f} GiB"


def format_table(results: list[Result]) -> str:
    """Returns a Markdown table of the fastest step of each result.

    The last columns compare with the fastest setting of TRL and with the limit of the hardware.
    """
    trl = min((min(r.seconds) for r in results if r.side == "TRL"), default=None)
    names = ["", "setting", "step, s", "sample, s", "update, s", "peak, GiB", "speed (TRL = 1)", "of the limit"]
    rows = [names, ["---"] * len(names)]
    for r in results:
        best = min(range(len(r.seconds)), key=r.seconds.__getitem__)
        step, sampling = r.seconds[best], r.sample_seconds[best]
        times = [f"{t:.2f}" for t in (step, sampling, step - sampling)]
        limit = f"{r.limit_seconds / step:.0%}" if r.limit_seconds else ""
        rows.append([r.side, r.setting, *times, f"{r.peak_gib:.1f}", f"{trl / step:.2f}" if trl else "", limit])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def measure_trl_settings(settings: list[str], job: Job, path: str | None) -> list[Result | None]:
    """Measures TRL with each of `settings`; None = all attempts of a setting failed.

    "vllm:64:keep" is vLLM with 64 samples per microbatch and activations kept. "vllm" alone tries the settings of the
    search, the fastest first, until one fits into memory beside vLLM.
    """
    ranked = rank_trl_settings(job, path) if any(":" not in s for s in settings) else []
    results = []
    for setting in settings:
        engine, _, rest = setting.partition(":")
        trials = (apply_setting(replace(job, engine=engine), s) for s in ([rest] if rest else ranked))
        results.append(next((r for trial in trials if (r := measure_in_process("trl", trial, path)) is not None), None))
    return results


def main(arguments: list[str]) -> None:
    """Writes the model, measures both sides and prints the table."""
    from cohort.models.shapes import find_shape

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--only", choices=["cohort", "trl"])
    parser.add_argument("--trl", nargs="+", default=["vllm", "generate"])
    parser.add_argument("--trl-pythonpath", metavar="FOLDER", help="where TRL and vLLM are, if not installed")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--completion-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2, help="measured steps; the fastest counts")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        config = find_shape(a.shape)
        write_model(config, Path(folder) / "model", a.device)
        ids = make_prompts(config.vocab_size, a.prompts, a.prompt_tokens)
        job = Job(
            model=str(Path(folder) / "model"),
            texts=[" ".join(f"t{n}" for n in row) for row in ids],
            ids=ids,
            samples=a.samples,
            completion_tokens=a.completion_tokens,
            steps=a.steps,
            threads=0,
            device=a.device,
        )
        found = [] if a.only == "trl" else [measure_in_process("cohort", job, str(ROOT / "src"))]
        if a.only != "cohort":
            found += measure_trl_settings(a.trl, job, a.trl_pythonpath)
    results = [r for r in found if r is not None]
    print(f"\n{a.shape}: {a.prompts} x {a.samples} samples, {a.prompt_tokens} + {a.completion_tokens} tokens\n")
    print(format_table(results))
    if a.out:
        a.out.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(*sys.argv[2:])
    else:
        main(sys.argv[1:])
