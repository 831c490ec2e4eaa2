"""Sampling on a GPU, Cohort's engine against vLLM's: same shapes, lengths and machine, random weights, bf16.

    PYTHONPATH=src python3 benchmarks/engine_vs_vllm.py --out engine_vs_vllm.json
    ... --vllm-pythonpath FOLDER             # where vLLM is, if it is not in the interpreter's own packages
    ... --models qwen2.5-0.5b --cases fixed --only cohort
    python3 benchmarks/engine_vs_vllm.py --show a.json b.json    # one table of what several runs wrote

Each side runs in its own process, one after the other, a process a model; no file or network is needed. A case is
warmed up once and measured `--repeats` times, the median counts; every run has other prompts, so that no cache
of prompts helps. Every completion has exactly the asked length, temperature 1, with the sampled token's
log-probability. vLLM runs with full CUDA graphs, prefix caching, as many sequences as there are samples, flat
log-probabilities and no tokenizer. The first model's first case is run with asynchronous scheduling off and on,
everything else with the faster of the two.

Cohort's start-up is from the weights on the GPU to the first token of the first request, vLLM's from the call of
LLM(...). The limit (see `cohort.models.limits`) is computed from rates measured in Cohort's own process.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sides import run_side, send_answer

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("prefill", "decode", "draw")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of `prompts` x `samples`, all started at once."""

    name: str
    model: str
    prompts: int = 64
    samples: int = 8
    prompt_tokens: int = 256
    completion_tokens: int = 512  # the most, where lengths vary
    varies: bool = False
    lengths: tuple[int, ...] = ()  # of the completions, group after group: filled in before a side sees it

    @property
    def num_samples(self) -> int:
        return self.prompts * self.samples

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def description(self) -> str:
        most = f"<= {self.completion_tokens} (mean {statistics.mean(self.lengths):.0f})"
        return f"{self.prompts} x {self.samples}, {self.prompt_tokens} + {most if self.varies else self.lengths[0]}"


FIRST = "qwen2.5-0.5b"
CASES = (
    Case(name="fixed", model=FIRST),
    Case(name="variable", model=FIRST, varies=True),
    Case(name="unshared", model=FIRST, prompts=512, samples=1),
    Case(name="long", model=FIRST, prompt_tokens=1024, completion_tokens=256),
    Case(name="fixed", model="qwen2.5-1.5b"),
    Case(name="fixed", model="qwen2.5-3b"),
    Case(name="fixed", model="smollm2-135m"),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process measures: the cases of one model."""

    model: str
    folder: str  # with the model's config.json
    vocab_size: int
    cases: tuple[Case, ...]
    repeats: int
    asynchronous: bool = True  # vLLM's scheduling
    device: str = "cuda"

    @property
    def setting(self) -> str:
        return f"async {'on' if self.asynchronous else 'off'}"


@dataclass(kw_only=True)
class Result:
    """What one side did in one case."""

    side: str
    setting: str
    model: str
    case: str
    words: str
    num_tokens: int  # of a run
    seconds: list[float]
    warm_up_seconds: float
    start_up_seconds: float
    phases: dict[str, float] = field(default_factory=dict)  # mean seconds of a run
    limit_seconds: float = 0.0  # 0 = not known
    unshared_limit_seconds: float = 0.0  # if every sample had its own prompt
    rates: dict[str, float] = field(default_factory=dict)
    peak_gib: float = 0.0  # GPU memory of the process, with a case's engine
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        return self.num_tokens / statistics.median(self.seconds)


def make_prompts(job: Job, case: Case, run: int) -> list[list[int]]:
    """Random ids, others in every run, the same on both sides."""
    rng = random.Random(f"{case.model} {case.name} {run}")
    return [[rng.randrange(job.vocab_size) for _ in range(case.prompt_tokens)] for _ in range(case.prompts)]


def time_call(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


# ---- Cohort -----------------------------------------------------------------------------------------------


def measure_cohort(job: Job) -> Iterator[Result]:
    import torch

    from cohort.models import limits
    from cohort.models.shapes import find_shape, make_random_decoder

    dtype = torch.bfloat16
    on_gpu = job.device == "cuda"
    rates = limits.measure_gpu_rates(dtype) if on_gpu else None
    config = find_shape(job.model)
    decoder = make_random_decoder(config, dtype, job.device)
    for case in job.cases:
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        result = measure_cohort_case(job, case, decoder)
        if rates is not None:
            shape = limits.BatchShape(
                prompts=case.prompts,
                samples=case.samples,
                prompt_tokens=case.prompt_tokens,
                completion_tokens=case.completion_tokens,
                lengths=case.lengths,
            )
            result.limit_seconds = limits.estimate_sampling_seconds(config, shape, rates, dtype.itemsize).total
            result.unshared_limit_seconds = limits.estimate_sampling_seconds(
                config, shape.without_sharing(), rates, dtype.itemsize
            ).total
            result.rates = asdict(rates)
            result.peak_gib = torch.cuda.max_memory_reserved() / 2**30
            result.device = torch.cuda.get_device_name()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        yield result


def measure_cohort_case(job: Job, case: Case, decoder: Any) -> Result:
    from cohort.engines.base import sample
    from cohort.engines.native import make_native_engine

    batches = [make_cohort_requests(job, case, run) for run in range(job.repeats + 1)]
    first = batches[0][0]
    begin = time.perf_counter()
    engine = make_native_engine(decoder, lambda ids: "", slots=case.num_samples, max_context=case.context_tokens)
    sample(engine, [replace(first, sampling=replace(first.sampling, max_tokens=1))])
    start_up = time.perf_counter() - begin
    warm_up, _ = time_call(lambda: sample(engine, batches[0]))
    before = replace(engine.work)
    seconds = []
    for batch in batches[1:]:
        took, samples = time_call(lambda batch=batch: sample(engine, batch))
        seconds.append(took)
        for request in batch:
            done, asked = samples[request.id], request.sampling.max_tokens
            assert len(done.tokens) == len(done.sampler_logprobs) == asked, (request.id, len(done.tokens), asked)
    after = engine.work
    spent = {name: getattr(after, f"{name}_seconds") - getattr(before, f"{name}_seconds") for name in PHASES}
    return Result(
        side="Cohort",
        setting="",
        model=case.model,
        case=case.name,
        words=case.description,
        num_tokens=sum(case.lengths),
        seconds=seconds,
        warm_up_seconds=warm_up,
        start_up_seconds=start_up,
        phases={name: total / job.repeats for name, total in spent.items()},
        versions={"torch": version("torch")},
    )


def make_cohort_requests(job: Job, case: Case, run: int) -> list[Any]:
    from cohort.engines.base import Request
    from cohort.types import Key, Sampling

    lengths = iter(case.lengths)
    return [
        Request(
            id=f"{p}/{i}",
            tokens=ids,
            sampling=Sampling(max_tokens=next(lengths)),
            key=Key(seed=0, purpose="bench", task="bench", prompt_id=str(p), visit=run, sample=i),
        )
        for p, ids in enumerate(make_prompts(job, case, run))
        for i in range(case.samples)
    ]


# ---- vLLM -------------------------------------------------------------------------------------------------


def measure_vllm(job: Job) -> Iterator[Result]:
    from vllm import LLM

    prompts, _ = make_vllm_requests(job, job.cases[0], 0)
    begin = time.perf_counter()
    llm = LLM(
        model=job.folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max(case.context_tokens for case in job.cases),
        max_num_seqs=max(case.num_samples for case in job.cases),
        enable_prefix_caching=True,
        async_scheduling=job.asynchronous,
        compilation_config={"cudagraph_mode": "FULL_AND_PIECEWISE"},
        gpu_memory_utilization=0.6,
    )
    llm.generate(prompts[:1], [make_vllm_params(1, 1)], use_tqdm=False)
    start_up = time.perf_counter() - begin
    for case in job.cases:
        yield measure_vllm_case(job, case, llm, start_up)


def measure_vllm_case(job: Job, case: Case, llm: Any, start_up: float) -> Result:
    import torch
    import vllm

    seconds = []
    for run in range(job.repeats + 1):
        prompts, params = make_vllm_requests(job, case, run)
        took, outputs = time_call(lambda p=prompts, s=params: llm.generate(p, s, use_tqdm=False))
        seconds.append(took)
        completions = [completion for output in outputs for completion in output.outputs]
        for completion, asked in zip(completions, case.lengths, strict=True):
            assert len(completion.token_ids) == len(completion.logprobs) == asked, (len(completion.token_ids), asked)
    return Result(
        side="vLLM",
        setting=job.setting,
        model=case.model,
        case=case.name,
        words=case.description,
        num_tokens=sum(case.lengths),
        seconds=seconds[1:],
        warm_up_seconds=seconds[0],
        start_up_seconds=start_up,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        versions={"torch": torch.__version__, "vllm": vllm.__version__},
    )


def make_vllm_requests(job: Job, case: Case, run: int) -> tuple[list[Any], list[Any]]:
    """A group is one request of n samples; completions of their own lengths are requests of their own."""
    from vllm.inputs import TokensPrompt

    rows = make_prompts(job, case, run)
    if case.varies:
        rows = [ids for ids in rows for _ in range(case.samples)]
        params = [make_vllm_params(1, length) for length in case.lengths]
    else:
        params = [make_vllm_params(case.samples, case.completion_tokens) for _ in rows]
    return [TokensPrompt(prompt_token_ids=ids) for ids in rows], params


def make_vllm_params(n: int, length: int) -> Any:
    from vllm import SamplingParams

    flat = {"flat_logprobs": True} if "flat_logprobs" in inspect.signature(SamplingParams).parameters else {}
    return SamplingParams(
        n=n, max_tokens=length, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False, **flat
    )


# ---- both -------------------------------------------------------------------------------------------------


def run_worker(side: str, given: str) -> None:
    """One side's process: a marked line for every case, as soon as it is measured."""
    read = json.loads(Path(given).read_text())
    cases = tuple(Case(**(c | {"lengths": tuple(c["lengths"])})) for c in read.pop("cases"))
    job = Job(**read, cases=cases)
    for result in measure_cohort(job) if side == "cohort" else measure_vllm(job):
        send_answer(asdict(result))


def measure_in_process(side: str, job: Job, python: str, path: str | None) -> Iterator[Result]:
    """Run one side in its own process; a side that fails is told, and the others go on."""
    return (Result(**found) for found in run_side(__file__, side, job, path, python))


def make_jobs(a: argparse.Namespace, root: Path) -> Iterator[Job]:
    """One for each model, its config.json written to a folder of its own."""
    from cohort.models.config import to_hf
    from cohort.models.limits import draw_lognormal_lengths
    from cohort.models.shapes import find_shape

    chosen = [c for c in CASES if c.model in a.models and c.name in a.cases]
    for model in dict.fromkeys(c.model for c in chosen):
        config, folder = find_shape(model), root / model
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(to_hf(config) | {"torch_dtype": "bfloat16"}))
        cases = []
        for case in (c for c in chosen if c.model == model):
            fixed = (case.completion_tokens,) * case.num_samples
            own = draw_lognormal_lengths(case.num_samples, case.completion_tokens) if case.varies else fixed
            cases.append(replace(case, lengths=own))
        yield Job(model=model, folder=str(folder), vocab_size=config.vocab_size, cases=tuple(cases), repeats=a.repeats)


def measure_all(a: argparse.Namespace) -> Iterator[Result]:
    """Every result as soon as it is there."""
    schedule = {"both": None, "on": True, "off": False}[a.vllm_async]
    with tempfile.TemporaryDirectory() as folder:
        for job in make_jobs(a, Path(folder)):
            if a.only != "vllm":
                yield from measure_in_process("cohort", job, sys.executable, str(ROOT / "src"))
            if a.only != "cohort":
                schedule = yield from measure_vllm_model(job, a, schedule)


def measure_vllm_model(job: Job, a: argparse.Namespace, schedule: bool | None) -> Generator[Result, None, bool]:
    """A model's results, and how vLLM schedules from now on; None = find out which is faster on the first case."""

    def run(asynchronous: bool, cases: tuple[Case, ...]) -> Generator[Result, None, float]:
        """Returns the speed in the first of the cases."""
        speeds = []
        if cases:
            trial = replace(job, cases=cases, asynchronous=asynchronous)
            for result in measure_in_process("vllm", trial, a.vllm_python, a.vllm_pythonpath):
                speeds.append(result.speed)
                yield result
        return speeds[0] if speeds else 0.0

    if schedule is not None:
        yield from run(schedule, job.cases)
        return schedule
    off = yield from run(False, job.cases[:1])
    on = yield from run(True, job.cases)
    if off > on:
        yield from run(False, job.cases[1:])
    return on >= off


def format_result(r: Result) -> str:
    """One result in words."""
    spread = f"{min(r.seconds):.3f} to {max(r.seconds):.3f} s"
    parts = [
        f"{r.side} {r.setting}".strip(),
        r.model,
        f"{r.case} ({r.words})",
        f"{r.speed:.0f} tokens/s ({spread})",
        f"start-up {r.start_up_seconds:.1f} s",
        f"warm-up {r.warm_up_seconds:.1f} s",
    ]
    if r.limit_seconds:
        parts.append(f"{compute_share_of_limit(r):.0%} of the limit")
    if r.phases:
        parts.append(", ".join(f"{name} {seconds:.3f} s" for name, seconds in r.phases.items()))
    return "; ".join(parts)


def compute_share_of_limit(r: Result) -> float:
    return r.limit_seconds / statistics.median(r.seconds)


def format_table(results: Iterable[Result]) -> str:
    """Markdown: a row a case, vLLM in its faster setting."""
    found: dict[tuple[str, str], dict[str, Result]] = {}
    for r in results:
        best = found.setdefault((r.model, r.case), {})
        if r.side not in best or r.speed > best[r.side].speed:
            best[r.side] = r
    names = ["model", "case", "shape", "Cohort, tok/s", "vLLM, tok/s", "factor", "of the limit"]
    names += [f"{name}, s" for name in PHASES] + ["start-up, s", "vLLM start-up, s", "vLLM setting"]
    rows = [names, ["---"] * len(names)]
    for (model, case), best in found.items():
        ours, theirs = best.get("Cohort"), best.get("vLLM")
        factor = f"{ours.speed / theirs.speed:.2f}" if ours and theirs else ""
        share = f"{compute_share_of_limit(ours):.0%}" if ours and ours.limit_seconds else ""
        row = [model, case, next(iter(best.values())).words]
        row += [f"{r.speed:.0f}" if r else "" for r in (ours, theirs)] + [factor, share]
        row += [f"{ours.phases[name]:.3f}" if ours else "" for name in PHASES]
        row += [f"{r.start_up_seconds:.1f}" if r else "" for r in (ours, theirs)] + [theirs.setting if theirs else ""]
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def describe_machine_and_versions(results: list[Result]) -> str:
    """What it ran on, and both of vLLM's settings where both were measured."""
    versions = sorted({f"{r.side}: {n} {v}" for r in results for n, v in r.versions.items()})
    words = [*sorted({r.device for r in results if r.device}), *versions]
    rates = next((r.rates for r in results if r.rates), None)
    if rates:
        words.append(f"{rates['bytes'] / 1e9:.0f} GB/s copied and {rates['flops'] / 1e12:.0f} TFLOP/s multiplied")
    theirs = [r for r in results if r.side == "vLLM"]
    tried = [r for r in theirs if (r.model, r.case) == (theirs[0].model, theirs[0].case)]
    if len({r.setting for r in tried}) > 1:
        words += [f"vLLM {r.setting}: {r.speed:.0f} tok/s ({r.model}, {r.case})" for r in tried]
    return "; ".join(words)


def list_missing_results(a: argparse.Namespace, results: list[Result]) -> list[str]:
    """What was asked for and is not there, because a side failed."""
    sides = {None: ("Cohort", "vLLM"), "cohort": ("Cohort",), "vllm": ("vLLM",)}[a.only]
    there = {(r.side, r.model, r.case) for r in results}
    asked = [(side, c.model, c.name) for side in sides for c in CASES if c.model in a.models and c.name in a.cases]
    return [" ".join(one) for one in asked if one not in there]


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    models, names = list(dict.fromkeys(c.model for c in CASES)), list(dict.fromkeys(c.name for c in CASES))
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--only", choices=["cohort", "vllm"], help="measure one side")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm-async", choices=["both", "on", "off"], default="both", help="asynchronous scheduling")
    parser.add_argument("--vllm-python", default="python3", help="interpreter that has vLLM")
    parser.add_argument("--vllm-pythonpath", help="its PYTHONPATH")
    parser.add_argument("--out", type=Path, help="write everything as JSON, anew after every case")
    parser.add_argument("--show", nargs="+", type=Path, metavar="JSON", help="measure nothing: print what was written")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--worker"]:
        run_worker(*arguments[1:])
        return
    a = parse_arguments(arguments)
    results: list[Result] = []
    if a.show:
        results = [Result(**r) for file in a.show for r in json.loads(file.read_text())["results"]]
    else:
        for result in measure_all(a):
            results.append(result)
            print(format_result(result), flush=True)
            if a.out:  # whole at any moment: the machine may be taken away
                aside = a.out.with_name(a.out.name + ".part")
                aside.write_text(json.dumps({"results": [asdict(r) for r in results]}, indent=2) + "\n")
                aside.replace(a.out)
    print(f"\n{format_table(results)}\n\n{describe_machine_and_versions(results)}", flush=True)
    if not a.show and (missing := list_missing_results(a, results)):
        sys.exit(f"not measured: {', '.join(missing)}")


if __name__ == "__main__":
    main(sys.argv[1:])
