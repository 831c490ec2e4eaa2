"""Sampling on a GPU, Cohort's engine against vLLM, with the same shapes, lengths and random weights in bf16.

    PYTHONPATH=src python3 benchmarks/engine_vs_vllm.py --out engine_vs_vllm.json
    ... --vllm-pythonpath FOLDER             # where vLLM is, if it is not installed
    ... --models qwen2.5-0.5b --cases fixed --only cohort
    python3 benchmarks/engine_vs_vllm.py --show a.json b.json    # one table of several files

Each side runs in its own process per model, one after the other. No file or network is needed. A case runs once as
warm-up and then `--repeats` times, of which the median counts. Every run has other prompts, so that no cache of prompts
helps. Every completion has exactly the requested length, at temperature 1, with the log-probability of each token. vLLM
runs with full CUDA graphs, prefix caching, as many sequences as there are samples, flat log-probabilities and no
tokenizer. The first case of the first model runs with asynchronous scheduling off and on; all other cases run with the
faster of the two.

The start-up of Cohort lasts from the weights on the GPU to the first token of the first request. That of vLLM begins
with the call of LLM(...). The limit (see `cohort.models.limits`) is computed from rates measured in Cohort's process.
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
    """A batch of `prompts` x `samples` that is sampled at once."""

    name: str
    model: str
    prompts: int = 64
    samples: int = 8
    prompt_tokens: int = 256
    # The length of every completion; the largest one if `varies`.
    completion_tokens: int = 512
    varies: bool = False
    # The length of each completion, group after group. `make_jobs` sets it.
    lengths: tuple[int, ...] = ()

    @property
    def num_samples(self) -> int:
        """Samples of all prompts together."""
        return self.prompts * self.samples

    @property
    def context_tokens(self) -> int:
        """The most tokens of a prompt and its completion."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def description(self) -> str:
        """The shape in words, such as "64 x 8, 256 + 512"."""
        most = f"<= {self.completion_tokens} (mean {statistics.mean(self.lengths):.0f})"
        return f"{self.prompts} x {self.samples}, {self.prompt_tokens} + {most if self.varies else self.lengths[0]}"


FIRST = "qwen2.5-0.5b"
# The cases of the first model differ in lengths and sharing; the other models have only the first one.
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
    """The work of one process: the cases of one model."""

    model: str
    # The folder with the config.json of the model.
    folder: str
    vocab_size: int
    cases: tuple[Case, ...]
    repeats: int
    # vLLM: asynchronous scheduling.
    asynchronous: bool = True
    device: str = "cuda"

    @property
    def setting(self) -> str:
        """The setting of vLLM in words."""
        return f"async {'on' if self.asynchronous else 'off'}"


@dataclass(kw_only=True)
class Result:
    """The measurements of one side in one case. `seconds` has one number per run."""

    side: str
    setting: str
    model: str
    case: str
    words: str
    # Sampled tokens per run.
    num_tokens: int
    seconds: list[float]
    warm_up_seconds: float
    start_up_seconds: float
    # Mean seconds per run in each phase.
    phases: dict[str, float] = field(default_factory=dict)
    # The least time of a run on this hardware, and that without shared prompts; 0 = not known.
    limit_seconds: float = 0.0
    unshared_limit_seconds: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)
    # GPU memory of the process, with the engine of the case.
    peak_gib: float = 0.0
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Sampled tokens per second, in the median run."""
        return self.num_tokens / statistics.median(self.seconds)


def make_prompts(job: Job, case: Case, run: int) -> list[list[int]]:
    """Returns random token ids per prompt: different in every run, equal on both sides."""
    rng = random.Random(f"{case.model} {case.name} {run}")
    return [[rng.randrange(job.vocab_size) for _ in range(case.prompt_tokens)] for _ in range(case.prompts)]


def time_call(run: Callable[[], Any]) -> tuple[float, Any]:
    """Returns (seconds that the call took, its result)."""
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


# ---- Cohort -----------------------------------------------------------------------------------------------


def measure_cohort(job: Job) -> Iterator[Result]:
    """Yields the result of Cohort for each case, in the process of its side."""
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
        # Frees the engine of this case before the next one is made.
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        yield result


def measure_cohort_case(job: Job, case: Case, decoder: Any) -> Result:
    """Returns the result of Cohort in one case, without the limit of the hardware."""
    from cohort.engines.base import sample
    from cohort.engines.native import make_native_engine

    batches = [make_cohort_requests(job, case, run) for run in range(job.repeats + 1)]
    first = batches[0][0]
    begin = time.perf_counter()
    engine = make_native_engine(decoder, lambda ids: "", slots=case.num_samples, max_context=case.context_tokens)
    sample(engine, [replace(first, sampling=replace(first.sampling, max_tokens=1))])
    start_up = time.perf_counter() - begin
    # The first batch is the warm-up.
    warm_up, _ = time_call(lambda: sample(engine, batches[0]))
    # A copy, because the engine keeps counting in its own record.
    before = replace(engine.work)
    seconds = []
    for batch in batches[1:]:
        took, samples = time_call(lambda batch=batch: sample(engine, batch))
        seconds.append(took)
        for request in batch:
            done = samples[request.id]
            length = request.sampling.max_tokens
            assert len(done.tokens) == len(done.sampler_logprobs) == length, (request.id, len(done.tokens), length)
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
    """Returns the requests of one run, all samples of a prompt after each other."""
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
    """Yields the result of vLLM for each case, in the process of its side."""
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
    """Returns the result of vLLM in one case. `start_up` are the seconds that `llm` took to start."""
    import torch
    import vllm

    seconds = []
    for run in range(job.repeats + 1):
        prompts, params = make_vllm_requests(job, case, run)
        took, outputs = time_call(lambda p=prompts, s=params: llm.generate(p, s, use_tqdm=False))
        seconds.append(took)
        completions = [completion for output in outputs for completion in output.outputs]
        for completion, length in zip(completions, case.lengths, strict=True):
            assert len(completion.token_ids) == len(completion.logprobs) == length, (len(completion.token_ids), length)
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
    """Returns (prompts, sampling parameters) of one run for vLLM.

    A group is one request of n samples. If lengths vary, every sample is a request, because the length belongs to it.
    """
    from vllm.inputs import TokensPrompt

    rows = make_prompts(job, case, run)
    if case.varies:
        rows = [ids for ids in rows for _ in range(case.samples)]
        params = [make_vllm_params(1, length) for length in case.lengths]
    else:
        params = [make_vllm_params(case.samples, case.completion_tokens) for _ in rows]
    return [TokensPrompt(prompt_token_ids=ids) for ids in rows], params


def make_vllm_params(n: int, length: int) -> Any:
    """Returns the parameters for `n` samples of exactly `length` tokens."""
    from vllm import SamplingParams

    # Older versions do not have flat log-probabilities.
    flat = {"flat_logprobs": True} if "flat_logprobs" in inspect.signature(SamplingParams).parameters else {}
    return SamplingParams(
        n=n, max_tokens=length, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False, **flat
    )


# ---- both -------------------------------------------------------------------------------------------------


def run_worker(side: str, job_file: str) -> None:
    """Measures one side ("cohort" or "vllm") in this process and sends each result as soon as it is measured."""
    fields = json.loads(Path(job_file).read_text())
    cases = tuple(Case(**(c | {"lengths": tuple(c["lengths"])})) for c in fields.pop("cases"))
    job = Job(**fields, cases=cases)
    for result in measure_cohort(job) if side == "cohort" else measure_vllm(job):
        send_answer(asdict(result))


def measure_in_process(side: str, job: Job, python: str, path: str | None) -> Iterator[Result]:
    """Yields the results of one side from its own process. If it fails, stderr says so and there are fewer results."""
    return (Result(**answer) for answer in run_side(__file__, side, job, path, python))


def make_jobs(a: argparse.Namespace, root: Path) -> Iterator[Job]:
    """Yields one job per model. The config.json of the model is written to a folder below `root`."""
    from cohort.models.config import to_hf
    from cohort.models.limits import draw_lognormal_lengths
    from cohort.models.shapes import find_shape

    chosen = [c for c in CASES if c.model in a.models and c.name in a.cases]
    for model in dict.fromkeys(c.model for c in chosen):
        config = find_shape(model)
        folder = root / model
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(to_hf(config) | {"torch_dtype": "bfloat16"}))
        cases = []
        for case in (c for c in chosen if c.model == model):
            fixed = (case.completion_tokens,) * case.num_samples
            lengths = draw_lognormal_lengths(case.num_samples, case.completion_tokens) if case.varies else fixed
            cases.append(replace(case, lengths=lengths))
        yield Job(model=model, folder=str(folder), vocab_size=config.vocab_size, cases=tuple(cases), repeats=a.repeats)


def measure_all(a: argparse.Namespace) -> Iterator[Result]:
    """Yields the results of all models and sides, each as soon as it is measured."""
    schedule = {"both": None, "on": True, "off": False}[a.vllm_async]
    with tempfile.TemporaryDirectory() as folder:
        for job in make_jobs(a, Path(folder)):
            if a.only != "vllm":
                yield from measure_in_process("cohort", job, sys.executable, str(ROOT / "src"))
            if a.only != "cohort":
                schedule = yield from measure_vllm_model(job, a, schedule)


def measure_vllm_model(job: Job, a: argparse.Namespace, schedule: bool | None) -> Generator[Result, None, bool]:
    """Yields the results of vLLM for one model. Returns whether vLLM schedules asynchronously from now on.

    `schedule` is what earlier models returned; None = measure the first case both ways to find out.
    """

    def run(asynchronous: bool, cases: tuple[Case, ...]) -> Generator[Result, None, float]:
        """Yields the results of the cases. Returns the speed in the first one; 0 if it failed."""
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
    """Returns one result as a line of text."""
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
    """Returns which share of the possible speed was reached, 0 to 1."""
    return r.limit_seconds / statistics.median(r.seconds)


def format_table(results: Iterable[Result]) -> str:
    """Returns a Markdown table with one row per case, with vLLM in its faster setting."""
    best_by_case: dict[tuple[str, str], dict[str, Result]] = {}
    for r in results:
        best = best_by_case.setdefault((r.model, r.case), {})
        if r.side not in best or r.speed > best[r.side].speed:
            best[r.side] = r
    names = ["model", "case", "shape", "Cohort, tok/s", "vLLM, tok/s", "factor", "of the limit"]
    names += [f"{name}, s" for name in PHASES] + ["start-up, s", "vLLM start-up, s", "vLLM setting"]
    rows = [names, ["---"] * len(names)]
    for (model, case), best in best_by_case.items():
        ours = best.get("Cohort")
        theirs = best.get("vLLM")
        factor = f"{ours.speed / theirs.speed:.2f}" if ours and theirs else ""
        share = f"{compute_share_of_limit(ours):.0%}" if ours and ours.limit_seconds else ""
        row = [model, case, next(iter(best.values())).words]
        row += [f"{r.speed:.0f}" if r else "" for r in (ours, theirs)] + [factor, share]
        row += [f"{ours.phases[name]:.3f}" if ours else "" for name in PHASES]
        row += [f"{r.start_up_seconds:.1f}" if r else "" for r in (ours, theirs)] + [theirs.setting if theirs else ""]
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def describe_machine_and_versions(results: list[Result]) -> str:
    """Returns the devices, versions and measured rates, and the speeds of both settings of vLLM if both were tried."""
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
    """Returns the cases that are missing in `results` because a side failed, as "side model case"."""
    sides = {None: ("Cohort", "vLLM"), "cohort": ("Cohort",), "vllm": ("vLLM",)}[a.only]
    measured = {(r.side, r.model, r.case) for r in results}
    expected = [(side, c.model, c.name) for side in sides for c in CASES if c.model in a.models and c.name in a.cases]
    return [" ".join(names) for names in expected if names not in measured]


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Returns the options of the command line."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    models = list(dict.fromkeys(c.model for c in CASES))
    names = list(dict.fromkeys(c.name for c in CASES))
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--only", choices=["cohort", "vllm"], help="measure one side")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm-async", choices=["both", "on", "off"], default="both", help="asynchronous scheduling")
    parser.add_argument("--vllm-python", default="python3", help="interpreter that has vLLM")
    parser.add_argument("--vllm-pythonpath", help="its PYTHONPATH")
    parser.add_argument("--out", type=Path, help="write all results as JSON after every case")
    parser.add_argument(
        "--show", nargs="+", type=Path, metavar="JSON", help="print the table of these files and measure nothing"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Measures both sides and prints the table; with `--worker` measures one side in this process."""
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
            # The file is complete at any moment: the machine can disappear.
            if a.out:
                from cohort.system.disk import write_atomically

                write_atomically(a.out, json.dumps({"results": [asdict(r) for r in results]}, indent=2) + "\n")
    print(f"\n{format_table(results)}\n\n{describe_machine_and_versions(results)}", flush=True)
    if not a.show and (missing := list_missing_results(a, results)):
        sys.exit(f"not measured: {', '.join(missing)}")


if __name__ == "__main__":
    main(sys.argv[1:])
