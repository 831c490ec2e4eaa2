"""One GRPO step on a GPU, Cohort against TRL: same shape, prompts, lengths and reward, bf16, random weights.

    PYTHONPATH=src python3 benchmarks/step_vs_trl.py --shape qwen2.5-0.5b --trl-pythonpath FOLDER --out step.json
    ... --trl vllm:64 vllm:64:keep:bf16 generate:64     # engine, samples a microbatch, activations kept, bf16 weights
    ... --trl vllm generate                             # each with the setting that is fastest in a search before
    ... --only cohort

A folder with the shape's config, random weights (normal, 0.02) and a tokenizer of one word a token is written first;
both sides load it. A step is: sample, score, advantages, forward and backward, AdamW step; every completion
is exactly as long as asked. The first step of a side warms it up, the fastest of the others counts. TRL runs with
its vLLM in the same process ("colocate") or with Hugging Face's generate, without a reference model, with gradient
checkpointing (unless "keep"); weights are fp32 under bf16 autocast, as it loads them to train (unless "bf16", which
has no fp32 weights at all). The search trains on a quarter of the prompts with completions that nobody samples, since
only the training depends on these settings. Peak memory is the largest that torch held, vLLM's share included.
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
from typing import Any

from cpu_vs_trl import Job as CpuJob
from cpu_vs_trl import Result as CpuResult
from cpu_vs_trl import cohort_step, trl_settings, trl_train
from sides import answer, answers

ROOT = Path(__file__).resolve().parents[1]
TRIED = (16, 32, 64, 128)  # samples a microbatch


@dataclass(frozen=True, kw_only=True)
class Job(CpuJob):
    """What both sides do; `microbatch` and all but the device are TRL's settings."""

    device: str = "cuda"
    engine: str = "vllm"  # or "generate"
    checkpointing: bool = True
    weights: str = "fp32"

    @property
    def setting(self) -> str:
        kept = "checkpointing" if self.checkpointing else "activations kept"
        return f"{self.microbatch} samples a microbatch, {kept}, {self.weights} weights"


@dataclass(kw_only=True)
class Result(CpuResult):
    peak_gib: float = 0.0
    limit_seconds: float = 0.0


# ---- Cohort -----------------------------------------------------------------------------------------------


def cohort_side(job: Job) -> Result:
    import torch

    from cohort.algos.algorithm import build_algorithm
    from cohort.config.schema import GRPO
    from cohort.engines.native import native_engine
    from cohort.inspect.bench import measure as bench
    from cohort.models import limits
    from cohort.models.files import load_folder

    dtype = torch.bfloat16 if job.device == "cuda" else torch.float32
    decoder = load_folder(job.model, dtype).decoder.to(job.device)
    shape = limits.Shape(
        prompts=len(job.ids),
        samples=job.samples,
        prompt_tokens=len(job.ids[0]),
        completion_tokens=job.completion_tokens,
    )
    limit = bench._step_limit(decoder, shape)
    plan = bench._plan(decoder, shape, 0, kv=True)
    learner = bench._learner(decoder, 0, True, plan)
    engine = native_engine(
        decoder,
        lambda ids: " ".join(map(str, ids)),
        slots=job.num_samples,
        max_context=len(job.ids[0]) + job.completion_tokens,
        reserve=0 if plan is None else plan.update,
    )
    algo = build_algorithm(GRPO(), job.completion_tokens)
    result = Result(side="Cohort", setting=f"{learner.token_budget} tokens a microbatch", limit_seconds=limit.seconds)
    bench._forget_peak(decoder)
    for n in range(job.steps + 1):
        seconds, sample_seconds = cohort_step(job, engine, learner, algo)
        if n:
            result.seconds.append(seconds)
            result.sample_seconds.append(sample_seconds)
    return result


# ---- TRL --------------------------------------------------------------------------------------------------


def trl_side(job: Job) -> Result:
    result = Result(side="TRL", setting=f"{job.engine}, {job.setting}")
    steps, sampling, _ = trl_train(replace(job, steps=job.steps + 1), trl_config)
    result.seconds, result.sample_seconds = steps[1:], sampling[1:]
    return result


def trl_search(job: Job) -> Iterator[tuple[str, float]]:
    """(setting, seconds of a step) of everything tried; what does not fit in memory takes forever."""
    import torch

    part = len(job.ids) // 4
    small = replace(job, texts=job.texts[:part], ids=job.ids[:part], engine="generate", made_up=True, steps=1)
    for size, kept, weights in product(TRIED, ("", "keep"), ("fp32", "bf16")):
        if size > small.num_samples:
            continue
        setting = ":".join(x for x in (str(size), kept, weights) if x)
        try:
            seconds = min(trl_side(with_setting(small, setting)).seconds)
        except torch.OutOfMemoryError:
            seconds = math.inf
        gc.collect()
        torch.cuda.empty_cache()
        yield setting, seconds


def with_setting(job: Job, setting: str) -> Job:
    """ "64:keep:bf16" -> 64 samples a microbatch, activations kept, weights in bf16."""
    size, *rest = setting.split(":")
    return replace(
        job,
        microbatch=int(size),
        checkpointing="keep" not in rest,
        weights="bf16" if "bf16" in rest else "fp32",
    )


def trl_config(job: CpuJob, folder: str) -> Any:
    import trl

    assert isinstance(job, Job)
    on_gpu, length = job.device == "cuda", job.completion_tokens
    engine: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": length}}
    if job.engine == "vllm":
        engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
            "generation_kwargs": {"ignore_eos": True, "min_tokens": length},
        }
    return trl.GRPOConfig(
        **trl_settings(job, folder),
        **engine,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=job.checkpointing,
        model_init_kwargs={"dtype": "bfloat16" if job.weights == "bf16" else "float32"},
    )


# ---- both -------------------------------------------------------------------------------------------------


def write_model(shape: str, folder: Path, device: str) -> int:
    """Random weights, and a tokenizer that spells token n as "tn". Returns the size of the vocabulary."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from cohort.models.files import save_folder
    from cohort.models.shapes import named_shape, random_decoder

    config = named_shape(shape)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    save_folder(random_decoder(config, dtype, device), None, None, folder)
    special = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<pad>"}
    names = [*special.values(), *(f"t{n}" for n in range(len(special), config.vocab_size))]
    words = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    fast.save_pretrained(folder)
    return config.vocab_size


def make_prompts(vocab: int, num: int, length: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, vocab) for _ in range(length)] for _ in range(num)]


def worker(side: str, given: str) -> None:
    job = Job(**json.loads(Path(given).read_text()))
    if side == "search":
        for found in trl_search(job):
            answer(found)
        return
    result = cohort_side(job) if side == "cohort" else trl_side(job)
    if job.device == "cuda":
        import torch

        result.peak_gib = torch.cuda.max_memory_allocated() / 2**30
    packages = ["torch"] if side == "cohort" else ["torch", "transformers", "trl"]
    if side == "trl" and job.engine == "vllm":
        packages.append("vllm")
    result.versions = {name: version(name) for name in packages}
    answer(asdict(result))


def measure(side: str, job: Job, path: str | None) -> Result | None:
    """Run one side in its own process; None = it failed."""
    for found in answers(__file__, side, job, path):
        result = Result(**found)
        print(words(result), flush=True)
        return result
    return None


def search(job: Job, path: str | None) -> list[str]:
    """TRL's settings, the fastest first."""
    seconds = {}
    for setting, taken in answers(__file__, "search", job, path):
        seconds[setting] = taken
        print(f"TRL, {setting}: {taken:.2f} s to train on a quarter of the batch", flush=True)
    return sorted((s for s, taken in seconds.items() if taken < math.inf), key=seconds.__getitem__)


def words(r: Result) -> str:
    step, sampling = min(r.seconds), min(r.sample_seconds)
    return f"{r.side} ({r.setting}): step {step:.2f} s, sampling {sampling:.2f} s, {r.peak_gib:.1f} GiB"


def table(results: list[Result]) -> str:
    """Markdown; the last columns compare with the fastest TRL setting and with the limit."""
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


def measure_trl(settings: list[str], job: Job, path: str | None) -> list[Result | None]:
    """ "vllm:64:keep" -> vLLM, 64 samples a microbatch, activations kept; "vllm" -> the fastest that fits beside it."""
    found = search(job, path) if any(":" not in s for s in settings) else []
    results = []
    for setting in settings:
        engine, _, rest = setting.partition(":")
        trials = (with_setting(replace(job, engine=engine), s) for s in ([rest] if rest else found))
        results.append(next((r for trial in trials if (r := measure("trl", trial, path)) is not None), None))
    return results


def main(arguments: list[str]) -> None:
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
        vocab = write_model(a.shape, Path(folder) / "model", a.device)
        ids = make_prompts(vocab, a.prompts, a.prompt_tokens)
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
        found = [] if a.only == "trl" else [measure("cohort", job, str(ROOT / "src"))]
        if a.only != "cohort":
            found += measure_trl(a.trl, job, a.trl_pythonpath)
    results = [r for r in found if r is not None]
    print(f"\n{a.shape}: {a.prompts} x {a.samples} samples, {a.prompt_tokens} + {a.completion_tokens} tokens\n")
    print(table(results))
    if a.out:
        a.out.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main(sys.argv[1:])
