"""One GRPO step on a CPU, Cohort against TRL: same model, prompts, group size, lengths, reward and threads.

    cohort pull smollm2-135m
    make test-peers                                   # makes .venv-peers, the environment TRL is installed in
    .venv/bin/python benchmarks/cpu_vs_trl.py FOLDER --trl-python .venv-peers/bin/python --out cpu_vs_trl.json

Each side runs in its own process, one after the other, in exact fp32, with every completion exactly as long
as asked (no end-of-sequence stop on either side). A step is: sample, score, advantages, forward and backward,
AdamW step. A tiny step warms each process up and is not counted. Peak memory is the process's largest
resident set. The CPU seconds tell whether the machine was quiet: then they are about threads x seconds.
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


@dataclass(frozen=True, kw_only=True)
class Job:
    """What both sides do."""

    model: str
    texts: list[str]  # the prompts
    ids: list[list[int]]  # the same, as the tokenizer gives them
    samples: int  # per prompt
    completion_tokens: int
    steps: int
    threads: int
    microbatch: int = 16  # samples in a TRL forward/backward (Cohort goes by tokens)
    token_budget: int = 1152  # tokens in a Cohort forward/backward
    slots: int = 128  # samples Cohort decodes at once (TRL: all of them)
    made_up: bool = False  # TRL trains on completions that nobody sampled

    @property
    def num_samples(self) -> int:
        return len(self.ids) * self.samples


@dataclass(kw_only=True)
class Result:
    """What one side did: a step's seconds, and where they went."""

    side: str
    setting: str
    seconds: list[float] = field(default_factory=list)  # a step
    sample_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of all threads, in a step
    peak_rss_mib: float = 0.0
    load_average: float = 0.0  # when it began
    versions: dict[str, str] = field(default_factory=dict)


def reward(text: str) -> float:
    """Deterministic, different for nearly every text, the same on both sides."""
    return zlib.crc32(text.encode()) % 1000 / 1000


# ---- Cohort -----------------------------------------------------------------------------------------------


def cohort_side(job: Job) -> Result:
    """The library's own stages, in the order of its training loop."""
    from cohort.system.process import keep_memory

    keep_memory()  # as the command line does
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
    result = Result(side="Cohort", setting=f"{job.slots} slots, packed fp32, {job.token_budget} tokens a microbatch")
    for task in (warm_up(job), *[job] * job.steps):
        context = len(task.ids[0]) + task.completion_tokens
        engine = NativeEngine(decoder, tokenizer.decode, slots=task.slots, max_context=context, weights="packed")
        learner = LocalLearner(decoder, config, OptimConfig(lr=1e-6), num_updates=1)
        algo = build_algorithm(GRPO(), task.completion_tokens)
        cpu = time.process_time()
        seconds, sample_seconds = cohort_step(task, engine, learner, algo)
        if task is job:
            result.seconds.append(seconds)
            result.sample_seconds.append(sample_seconds)
            result.cpu_seconds.append(time.process_time() - cpu)
    return result


def cohort_step(job: Job, engine: Any, learner: Any, algo: Any) -> tuple[float, float]:
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
    sampled = time.perf_counter()
    assert all(len(s.tokens) == job.completion_tokens for s in samples.values())
    groups = []
    for p, (text, ids) in enumerate(zip(job.texts, job.ids, strict=True)):
        members = [samples[f"{p}/{i}"] for i in range(job.samples)]
        for member in members:
            member.reward = reward(member.text)
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
    return time.perf_counter() - begin, sampled - begin


# ---- TRL --------------------------------------------------------------------------------------------------


def trl_side(job: Job) -> Result:
    """TRL's GRPOTrainer as it runs on a CPU: no reference model, no gradient checkpointing, no logging."""
    import torch

    torch.set_num_threads(job.threads)
    result = Result(side="TRL", setting=f"{job.microbatch} samples a microbatch")
    small = warm_up(job)
    trl_train(replace(small, microbatch=small.num_samples, steps=1), trl_config)
    result.seconds, result.sample_seconds, result.cpu_seconds = trl_train(job, trl_config)
    return result


def trl_train(job: Job, config: Callable[[Job, str], Any]) -> tuple[list[float], list[float], list[float]]:
    import transformers
    import trl
    from datasets import Dataset

    steps: list[float] = []
    sampling: list[float] = []
    cpu: list[float] = []

    class Timed(trl.GRPOTrainer):
        """Times the sampling, and holds it to the lengths and prompts that were asked for."""

        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            if job.made_up:
                completion_ids, logprobs = [[n % 1000] * job.completion_tokens for n in range(len(prompt_ids))], None
            else:
                completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            sampling.append(time.perf_counter() - begin)
            asked = sorted(tuple(ids) for ids in job.ids for _ in range(job.samples))
            assert sorted(map(tuple, prompt_ids)) == asked, (prompt_ids[0], asked[0])
            assert {len(ids) for ids in completion_ids} == {job.completion_tokens}
            return completion_ids, logprobs

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            steps.append(-time.perf_counter())
            cpu.append(-time.process_time())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps[-1] += time.perf_counter()
            cpu[-1] += time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=job.model,
            reward_funcs=lambda completions, **_: [reward(text) for text in completions],
            args=config(job, folder),
            train_dataset=Dataset.from_dict({"prompt": job.texts}),
            # by this name, or transformers picks a class by the model's that does not read the file as it is
            processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(job.model),
            callbacks=[Clock()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return steps, sampling, cpu


def trl_config(job: Job, folder: str) -> Any:
    import trl

    exact = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    lengths = {"generation_kwargs": {"min_new_tokens": job.completion_tokens}}
    return trl.GRPOConfig(**trl_settings(job, folder), **exact, **lengths)


def trl_settings(job: Job, folder: str) -> dict[str, Any]:
    """What is the same on every device."""
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
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


# ---- both -------------------------------------------------------------------------------------------------


def warm_up(job: Job) -> Job:
    """The same code paths in a few seconds."""
    return replace(job, texts=job.texts[:2], ids=job.ids[:2], samples=2, completion_tokens=4, slots=4)


def make_prompts(model: str, num_prompts: int, num_tokens: int) -> tuple[list[str], list[list[int]]]:
    """Different texts of exactly `num_tokens` tokens, which both tokenizers give the same ids."""
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
        if tokenizer.encode(text, add_special_tokens=False).ids == ids:  # the cut did not fall inside a word
            texts.append(text)
            rows.append(ids)
    return texts, rows


def measure(side: str, python: str, job: Job) -> Result:
    """Run one side in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder) / "job.json", Path(folder) / "result.json"
        given.write_text(json.dumps(asdict(job)))
        threads = str(job.threads)
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
        }
        command = [python, str(Path(__file__).resolve()), "--worker", side, str(given), str(answer)]
        subprocess.run(command, check=True, env=environment)
        return Result(**json.loads(answer.read_text()))


def worker(side: str, given: str, answer: str) -> None:
    job = Job(**json.loads(Path(given).read_text()))
    load = os.getloadavg()[0]
    result = cohort_side(job) if side == "cohort" else trl_side(job)
    result.load_average = load
    result.peak_rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    packages = ["torch"] if side == "cohort" else ["torch", "transformers", "trl"]
    result.versions = {name: version(name) for name in packages}
    Path(answer).write_text(json.dumps(asdict(result)))


def table(results: list[Result]) -> str:
    """Markdown; the last column compares with the fastest TRL setting, if one was measured."""
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


def parse(arguments: list[str]) -> argparse.Namespace:
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
    if arguments[:1] == ["--worker"]:
        worker(*arguments[1:])
        return
    a = parse(arguments)
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
    results = [] if a.only == "trl" else [measure("cohort", sys.executable, job)]
    if a.only != "cohort":
        results += [measure("trl", a.trl_python, replace(job, microbatch=size)) for size in a.trl_microbatch]
    print(
        f"{Path(a.model).name}: {a.prompts} prompts x {a.samples} samples, {a.prompt_tokens} prompt + "
        f"{a.completion_tokens} completion tokens, fp32, {a.threads} threads\n"
    )
    print(table(results))
    if a.out:
        shape = {name: value for name, value in vars(a).items() if name not in ("out", "model", "trl_python")}
        report = {"shape": shape, "results": [asdict(r) for r in results]}
        a.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
