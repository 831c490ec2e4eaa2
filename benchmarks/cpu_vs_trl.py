"""One GRPO step on a CPU, Cohort against TRL, with the same model, prompts, group size, lengths, reward and threads.

    cohort pull smollm2-135m
    make test-peers                                   # makes .venv-peers, the environment with TRL
    .venv/bin/python benchmarks/cpu_vs_trl.py FOLDER --trl-python .venv-peers/bin/python --out cpu_vs_trl.json

Each side runs in its own process, one after the other, in exact fp32. Every completion has exactly the requested
length: neither side stops at an end-of-sequence token. A step is: sample, score, advantages, forward and backward pass,
AdamW step. A small step before is not counted. Peak memory is the largest resident set of the process. If no other
program used the machine, the CPU seconds are about threads x seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Settings of transformers' trainer: it writes and shows nothing.
QUIET = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work that both sides do, and the settings of each."""

    model: str
    # The prompts as texts and as token ids.
    texts: list[str]
    ids: list[list[int]]
    # Samples per prompt.
    samples: int
    completion_tokens: int
    steps: int
    threads: int
    # TRL: samples per forward and backward pass.
    microbatch: int = 16
    # Cohort: tokens per forward and backward pass, and samples that are decoded at the same time (TRL: all of them).
    token_budget: int = 1152
    slots: int = 128
    # TRL: train on invented completions without sampling.
    made_up: bool = False

    @property
    def num_samples(self) -> int:
        """Samples of all prompts together."""
        return len(self.ids) * self.samples


@dataclass(kw_only=True)
class Result:
    """The measurements of one side. Lists have one number per step."""

    side: str
    setting: str
    seconds: list[float] = field(default_factory=list)
    # The part of `seconds` that sampling took.
    sample_seconds: list[float] = field(default_factory=list)
    # CPU time of all threads together.
    cpu_seconds: list[float] = field(default_factory=list)
    peak_rss_mib: float = 0.0
    # The load of the machine before the measurement.
    load_average: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)


def compute_reward(text: str) -> float:
    """Returns a reward of 0 to 0.999 that depends only on the text and differs for nearly all texts."""
    return zlib.crc32(text.encode()) % 1000 / 1000


# ---- Cohort -----------------------------------------------------------------------------------------------


def measure_cohort(job: Job) -> Result:
    """Measures Cohort, in the process of its side: the stages of its training loop, in their order."""
    from cohort.system.process import keep_freed_memory

    # As the command line does, and before torch allocates anything.
    keep_freed_memory()
    import torch
    from tokenizers import Tokenizer

    from cohort.algos import build_algorithm
    from cohort.config.schema import GRPO, LearnerConfig, OptimConfig
    from cohort.engines.native.engine import NativeEngine
    from cohort.learner.local import LocalLearner
    from cohort.models.files import load_folder

    torch.set_num_threads(job.threads)
    decoder = load_folder(job.model, torch.float32).decoder
    tokenizer = Tokenizer.from_file(str(Path(job.model) / "tokenizer.json"))
    config = LearnerConfig(token_budget=job.token_budget)
    result = Result(side="Cohort", setting=f"{job.slots} slots, packed fp32, {job.token_budget} tokens per microbatch")
    # The first pass is the small step that is not counted.
    for task in (make_warm_up_job(job), *[job] * job.steps):
        context = len(task.ids[0]) + task.completion_tokens
        engine = NativeEngine(decoder, tokenizer.decode, slots=task.slots, max_context=context, weights="packed")
        learner = LocalLearner(decoder, config, OptimConfig(lr=1e-6), num_updates=1)
        algo = build_algorithm(GRPO(), task.completion_tokens)
        cpu = time.process_time()
        seconds, sample_seconds = run_cohort_step(task, engine, learner, algo)
        if task is job:
            result.seconds.append(seconds)
            result.sample_seconds.append(sample_seconds)
            result.cpu_seconds.append(time.process_time() - cpu)
    return result


def run_cohort_step(job: Job, engine: Any, learner: Any, algo: Any) -> tuple[float, float]:
    """Makes one training step. Returns (seconds of the step, seconds of its sampling)."""
    from cohort.data.pack import make_batch
    from cohort.engines.base import Request, sample
    from cohort.types import Group, Key, Prompt, Provenance, Sampling

    begin = time.perf_counter()
    sampling = Sampling(max_tokens=job.completion_tokens)
    requests = [
        Request(
            id=f"{p}/{i}",
            tokens=ids,
            sampling=sampling,
            key=Key(seed=0, purpose="train", task="bench", prompt_id=str(p), visit=0, sample=i),
        )
        for p, ids in enumerate(job.ids)
        for i in range(job.samples)
    ]
    samples = sample(engine, requests)
    sampling_end = time.perf_counter()
    assert all(len(s.tokens) == job.completion_tokens for s in samples.values())
    groups = []
    for p, (text, ids) in enumerate(zip(job.texts, job.ids, strict=True)):
        members = [samples[f"{p}/{i}"] for i in range(job.samples)]
        for member in members:
            member.reward = compute_reward(member.text)
        prompt = Prompt(
            task="bench",
            id=str(p),
            visit=0,
            row={},
            messages=[{"role": "user", "content": text}],
            tokens=ids,
            provenance=[int(Provenance.PROMPT)] * len(ids),
        )
        groups.append(Group(prompt=prompt, samples=members))
    groups = algo.advantages(groups)
    learner.update(make_batch(groups), algo)
    engine.load(learner.weights(), version=1)
    return time.perf_counter() - begin, sampling_end - begin


# ---- TRL --------------------------------------------------------------------------------------------------


def measure_trl(job: Job) -> Result:
    """Measures TRL's GRPOTrainer, in the process of its side.

    It runs as on a CPU: without reference model, gradient checkpointing and logging.
    """
    import torch

    torch.set_num_threads(job.threads)
    result = Result(side="TRL", setting=f"{job.microbatch} samples per microbatch")
    small = make_warm_up_job(job)
    run_trl(replace(small, microbatch=small.num_samples, steps=1), make_trl_config)
    result.seconds, result.sample_seconds, result.cpu_seconds = run_trl(job, make_trl_config)
    return result


def run_trl(job: Job, config: Callable[[Job, str], Any]) -> tuple[list[float], list[float], list[float]]:
    """Trains with TRL. `config` makes its config from the job and an output folder.

    Returns, per step, (seconds, seconds of sampling, CPU seconds).
    """
    import transformers
    import trl
    from datasets import Dataset

    steps: list[float] = []
    sampling: list[float] = []
    cpu: list[float] = []

    class Timed(trl.GRPOTrainer):
        """TRL's trainer, which also measures the sampling and checks prompts and lengths of completions."""

        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            """Samples as TRL does, or invents completions, and records the seconds."""
            begin = time.perf_counter()
            if job.made_up:
                completion_ids, logprobs = [[n % 1000] * job.completion_tokens for n in range(len(prompt_ids))], None
            else:
                completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            sampling.append(time.perf_counter() - begin)
            expected = sorted(tuple(ids) for ids in job.ids for _ in range(job.samples))
            assert sorted(map(tuple, prompt_ids)) == expected, (prompt_ids[0], expected[0])
            assert {len(ids) for ids in completion_ids} == {job.completion_tokens}
            return completion_ids, logprobs

    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=job.model,
            reward_funcs=lambda completions, **_: [compute_reward(text) for text in completions],
            args=config(job, folder),
            train_dataset=Dataset.from_dict({"prompt": job.texts}),
            # The class is named explicitly. AutoTokenizer chooses one by the type of the model, and that class does
            # not use tokenizer.json unchanged.
            processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(job.model),
            callbacks=[make_clock(steps, cpu)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return steps, sampling, cpu


def make_clock(steps: list[float], cpu: list[float], wait: Callable[[], object] = lambda: None) -> Any:
    """Returns a callback of transformers' trainer that adds the seconds and the CPU seconds of every step to two lists.

    `wait` is called before each look at the clock, so that a GPU has done its work.
    """
    import transformers

    class Clock(transformers.TrainerCallback):
        """Measures each step."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            """Adds a step, with the negative time of its begin."""
            wait()
            steps.append(-time.perf_counter())
            cpu.append(-time.process_time())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            """Turns the numbers of the step into its duration."""
            wait()
            steps[-1] += time.perf_counter()
            cpu[-1] += time.process_time()

    return Clock()


def make_trl_config(job: Job, folder: str) -> Any:
    """Returns TRL's config for a CPU. `folder` is its output folder."""
    import trl

    exact = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    lengths = {"generation_kwargs": {"min_new_tokens": job.completion_tokens}}
    return trl.GRPOConfig(**make_trl_settings(job, folder), **exact, **lengths)


def make_trl_settings(job: Job, folder: str) -> dict[str, Any]:
    """Returns the settings of TRL that are the same on a CPU and on a GPU."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": job.microbatch,
        "gradient_accumulation_steps": job.num_samples // job.microbatch,
        "num_generations": job.samples,
        "max_completion_length": job.completion_tokens,
        "max_steps": job.steps,
        "num_iterations": 1,
        "beta": 0.0,
        "loss_type": "grpo",
        "learning_rate": 1e-6,
        "temperature": 1.0,
        "shuffle_dataset": False,
        "logging_strategy": "no",
        **QUIET,
    }


# ---- both -------------------------------------------------------------------------------------------------


def make_warm_up_job(job: Job) -> Job:
    """Returns a job of a few seconds that uses the same code paths."""
    return replace(job, texts=job.texts[:2], ids=job.ids[:2], samples=2, completion_tokens=4, slots=4)


def make_prompts(model: str, num_prompts: int, num_tokens: int) -> tuple[list[str], list[list[int]]]:
    """Returns (texts, their token ids): different prompts of exactly `num_tokens` tokens.

    Each text is encoded to its ids again, so that both sides see the same tokens.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    texts: list[str] = []
    rows: list[list[int]] = []
    seed = 0
    while len(texts) < num_prompts:
        seed += 1
        story = " ".join(
            f"In year {seed + k} there were {seed * k + 7} boats in the bay, and" for k in range(num_tokens)
        )
        ids = tokenizer.encode(story, add_special_tokens=False).ids[:num_tokens]
        text = tokenizer.decode(ids)
        # Not so if the end of the ids is inside a word.
        if tokenizer.encode(text, add_special_tokens=False).ids == ids:
            texts.append(text)
            rows.append(ids)
    return texts, rows


def measure_in_process(side: str, python: str, job: Job) -> Result:
    """Runs one side ("cohort" or "trl") in its own process with the interpreter `python`, and returns its result."""
    with tempfile.TemporaryDirectory() as folder:
        job_file = Path(folder) / "job.json"
        result_file = Path(folder) / "result.json"
        job_file.write_text(json.dumps(asdict(job)))
        threads = str(job.threads)
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
        }
        command = [python, str(Path(__file__).resolve()), "--worker", side, str(job_file), str(result_file)]
        subprocess.run(command, check=True, env=environment)
        return Result(**json.loads(result_file.read_text()))


def run_worker(side: str, job_file: str, result_file: str) -> None:
    """Measures one side in this process. It reads the job from a file and writes the result to another."""
    job = Job(**json.loads(Path(job_file).read_text()))
    load = os.getloadavg()[0]
    result = measure_cohort(job) if side == "cohort" else measure_trl(job)
    result.load_average = load
    result.peak_rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    packages = ["torch"] if side == "cohort" else ["torch", "transformers", "trl"]
    result.versions = {name: version(name) for name in packages}
    Path(result_file).write_text(json.dumps(asdict(result)))


def format_table(results: list[Result]) -> str:
    """Returns a Markdown table of the fastest step of each result.

    The last column compares with the fastest setting of TRL, if TRL was measured.
    """
    trl = min((min(r.seconds) for r in results if r.side == "TRL"), default=None)
    names = [
        "",
        "setting",
        "step, s",
        "sample, s",
        "update, s",
        "CPU, s",
        "peak memory, MiB",
        "speed (TRL = 1)",
    ]
    rows = [names, ["---"] * len(names)]
    for r in results:
        best = min(range(len(r.seconds)), key=r.seconds.__getitem__)
        step, sampling = r.seconds[best], r.sample_seconds[best]
        times = [step, sampling, step - sampling, r.cpu_seconds[best]]
        speed = f"{trl / step:.2f}" if trl else ""
        rows.append([r.side, r.setting, *(f"{t:.1f}" for t in times), f"{r.peak_rss_mib:.0f}", speed])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Returns the options of the command line."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("model", help="folder in Hugging Face format, as `cohort pull` makes it")
    parser.add_argument("--trl-python", default=".venv-peers/bin/python", help="interpreter that has TRL")
    parser.add_argument("--only", choices=["cohort", "trl"], help="measure one side")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--completion-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1, help="measured steps; the fastest counts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-microbatch", type=int, nargs="+", default=[16], help="settings to try")
    parser.add_argument("--token-budget", type=int, default=1152)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Measures both sides and prints the table; with `--worker` measures one side in this process."""
    if arguments[:1] == ["--worker"]:
        run_worker(*arguments[1:])
        return
    a = parse_arguments(arguments)
    texts, ids = make_prompts(a.model, a.prompts, a.prompt_tokens)
    job = Job(
        model=str(Path(a.model).resolve()),
        texts=texts,
        ids=ids,
        samples=a.samples,
        completion_tokens=a.completion_tokens,
        steps=a.steps,
        threads=a.threads,
        token_budget=a.token_budget,
        slots=a.slots,
    )
    results = [] if a.only == "trl" else [measure_in_process("cohort", sys.executable, job)]
    if a.only != "cohort":
        results += [measure_in_process("trl", a.trl_python, replace(job, microbatch=size)) for size in a.trl_microbatch]
    print(
        f"{Path(a.model).name}: {a.prompts} prompts x {a.samples} samples, {a.prompt_tokens} prompt + "
        f"{a.completion_tokens} completion tokens, fp32, {a.threads} threads\n"
    )
    print(format_table(results))
    if a.out:
        shape = {name: value for name, value in vars(a).items() if name not in ("out", "model", "trl_python")}
        report = {"shape": shape, "results": [asdict(r) for r in results]}
        a.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
