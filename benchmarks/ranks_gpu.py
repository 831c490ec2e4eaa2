"""Ranks on one GPU: does one rank over nccl cost time, and do divided models need the memory that is planned?

    PYTHONPATH=src python3 benchmarks/ranks_gpu.py --out ranks_gpu.json                    # about three minutes
    PYTHONPATH=src python3 benchmarks/ranks_gpu.py --show ranks_gpu.json                   # the tables again

Speed: whole steps (sample, divide, update, new weights) of one process, and of one rank over nccl, in turns. A step
counts from the second of a process on; the medians of both sides are compared.

Memory: two ranks share the GPU, with tensors through host memory, and train on random tokens without an engine. So the
seconds of these say nothing. The most memory that torch held on each rank in the second update is compared with the
plan for the largest microbatch of that update. Weights are random. Without a GPU the script runs on the CPU, where
there is no plan and no memory to measure.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from cohort.algos.algorithm import Algorithm, build_algorithm
from cohort.config.algos import GRPO
from cohort.config.engines import NativeEngine
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.data.pack import make_batch, pack
from cohort.engines.base import Request, sample
from cohort.engines.factory import EngineModel, make_engine
from cohort.jobs.memory import plan_ranks
from cohort.learner.local import LocalLearner
from cohort.learner.plan import MemoryDemand
from cohort.loops.rl import update_policy
from cohort.models.decoder import Decoder
from cohort.models.device import DTYPES, choose_device
from cohort.models.shapes import find_shape, make_random_decoder
from cohort.ranks.groups import GroupMover
from cohort.ranks.join import join_ranks, leave_ranks
from cohort.ranks.launch import launch_ranks
from cohort.system.process import keep_freed_memory
from cohort.types import Group, Key, Prompt, Provenance, Sample, Sampling
from cohort.world import World
from ranks import make_prompts

GIB = 2**30
DIVISIONS = ("none", "optimizer", "full")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a process does. The batch is that of all ranks together."""

    shape: str = "qwen2.5-0.5b"
    dtype: str = "bfloat16"
    prompts: int = 64
    samples: int = 8
    prompt_tokens: int = 128
    completion_tokens: int = 256
    steps: int = 6  # after the first, which warms up
    shard: str = "none"
    measures_memory: bool = False  # two updates on random tokens, without an engine


@dataclass(kw_only=True)
class Found:
    """What the first rank of a process, or of several, has found."""

    seconds: list[float] = field(default_factory=list)  # per step
    planned: list[float] = field(default_factory=list)  # GiB at the peak of an update, by rank
    measured: list[float] = field(default_factory=list)
    state_planned: float = 0.0  # GiB of weights and optimizer
    state_measured: float = 0.0
    tokens: int = 0  # in the largest microbatch


# ---- in the process of a rank ----------------------------------------------------------------------------------------


class Subject:
    """A learner with random weights on this rank, as a run would make it, and the batch of this rank."""

    def __init__(self, job: Job, world: World) -> None:
        self.job, self.world = job, world
        self.device = choose_device("auto")
        grid = world.split(1)
        self.decoder: Decoder = make_random_decoder(find_shape(job.shape), DTYPES[job.dtype], str(self.device))
        batch = argparse.Namespace(prompts=job.prompts, tokens=job.prompt_tokens)
        self.prompts = make_prompts(self.decoder.config.vocab_size, batch)[world.rank :: world.size]
        tokens = len(self.prompts) * (job.prompt_tokens + job.samples * job.completion_tokens)
        demand = MemoryDemand(
            model=self.decoder.config,
            bytes_per_number=self.decoder.embed.itemsize,
            longest=job.prompt_tokens + job.completion_tokens,
            batch_tokens=tokens,
            kv_tokens=0 if job.measures_memory else tokens,
        )
        config = LearnerConfig(shard=job.shard)  # type: ignore[arg-type]
        self.plan, self.settings = plan_ranks(demand, config, self.device, grid)
        self.learner = LocalLearner(self.decoder, self.settings, OptimConfig(lr=1e-6), num_updates=1, world=grid)
        self.learner.apply_plan(self.plan)
        self.mover = GroupMover(world, grid)
        self.algo: Algorithm = build_algorithm(GRPO(), job.completion_tokens)

    def wait(self) -> None:
        """Waits until the GPU has done its work and all ranks are here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.world.gather(0)


def make_request(prompt: Prompt, number: int, visit: int, tokens: int) -> Request:
    """Returns the request for one completion of exactly `tokens` tokens."""
    key = Key(seed=0, purpose="bench", task="bench", prompt_id=prompt.id, visit=visit, sample=number)
    return Request(id=f"{prompt.id}/{number}", tokens=prompt.tokens, sampling=Sampling(max_tokens=tokens), key=key)


def reward(groups: list[Group]) -> list[Group]:
    """Gives the samples of each group the rewards 0 and 1 in turn, and returns the groups."""
    for group in groups:
        for number, member in enumerate(group.samples):
            member.reward = float(number % 2)
    return groups


def measure_speed(job: Job, world: World) -> Found:
    """Returns the seconds of whole steps."""
    subject = Subject(job, world)
    model = EngineModel(
        decoder=subject.decoder,
        context=job.prompt_tokens + job.completion_tokens,
        reserve=0 if subject.plan is None else subject.plan.update,
    )
    engine = make_engine(NativeEngine(slots=len(subject.prompts) * job.samples), model)
    seconds = []
    for step in range(job.steps + 1):
        subject.wait()
        begin = time.perf_counter()
        requests = [
            make_request(p, i, step, job.completion_tokens) for p in subject.prompts for i in range(job.samples)
        ]
        done = sample(engine, requests)
        groups = [Group(prompt=p, samples=[done[f"{p.id}/{i}"] for i in range(job.samples)]) for p in subject.prompts]
        update_policy(subject.learner, subject.algo, subject.mover.divide(reward(groups)), subject.settings)
        engine.load(subject.learner.weights(), version=step + 1)
        subject.wait()
        seconds.append(time.perf_counter() - begin)
    return Found(seconds=seconds[1:])


def make_random_groups(subject: Subject) -> list[Group]:
    """Returns this rank's groups, with random tokens as completions."""
    job = subject.job
    ids = torch.randint(subject.decoder.config.vocab_size, (len(subject.prompts), job.samples, job.completion_tokens))
    marks = [int(Provenance.SAMPLED)] * job.completion_tokens
    logprobs = [0.0] * job.completion_tokens

    def make_sample(tokens: list[int]) -> Sample:
        """Returns a sample of these tokens."""
        return Sample(tokens=tokens, provenance=marks, sampler_logprobs=logprobs)

    rows = zip(subject.prompts, ids.tolist(), strict=True)
    return reward([Group(prompt=p, samples=[make_sample(tokens) for tokens in row]) for p, row in rows])


def measure_memory(job: Job, world: World) -> Found:
    """Returns the seconds of two updates, and for a GPU the memory of the second."""
    subject = Subject(job, world)
    learner, plan = subject.learner, subject.plan
    found = Found()
    for _ in range(2):
        groups = subject.algo.advantages(make_random_groups(subject), world)
        batch = make_batch(groups, world=world)
        found.tokens = max(part.largest_microbatch for part in pack(batch, learner.token_budget))
        subject.wait()
        if plan is not None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            found.state_measured = torch.cuda.memory_allocated() / GIB
        begin = time.perf_counter()
        learner.update(batch, subject.algo)
        subject.wait()
        found.seconds.append(time.perf_counter() - begin)
    if plan is not None:
        found.state_planned = plan.state / GIB
        found.planned = world.gather((plan.state + plan.update_bytes_for(found.tokens)) / GIB)
        found.measured = world.gather(torch.cuda.max_memory_allocated() / GIB)
    return found


def run_rank(job: Job, out: Path) -> None:
    """Does a job as a process or as one of several ranks. The first rank writes what it has found."""
    keep_freed_memory()
    world = join_ranks("auto")
    found = (measure_memory if job.measures_memory else measure_speed)(job, world)
    if world.is_first:
        out.write_text(json.dumps(asdict(found)))
    leave_ranks()


# ---- in the process that measures ------------------------------------------------------------------------------------


def start(job: Job, num_ranks: int, folder: Path) -> Found:
    """Returns what a job finds on so many ranks; 0 = in a process that is no rank."""
    out, words = folder / "found.json", ["--job", json.dumps(asdict(job)), "--found", str(folder / "found.json")]
    if num_ranks == 0:
        subprocess.run([sys.executable, __file__, *words], check=True)
    elif launch_ranks(words, num_ranks, program=[__file__]):
        raise SystemExit(f"{num_ranks} ranks with {job} failed: see above")
    return Found(**json.loads(out.read_text()))


def measure(job: Job, turns: int, divisions: list[str], folder: Path) -> dict[str, Any]:
    """Returns all measurements as JSON: seconds by side, and memory by what two ranks divide."""
    seconds: dict[str, list[float]] = {"one process": [], "one rank": []}
    for _ in range(turns):
        for side, num in zip(seconds, (0, 1), strict=True):
            seconds[side] += start(job, num, folder).seconds
            print(f"{side}: {', '.join(f'{s:.3f}' for s in seconds[side])} s", flush=True)
    smaller = replace(job, prompts=max(2, job.prompts // 4), measures_memory=True)
    memory = {}
    for shard in divisions:
        memory[shard] = asdict(start(replace(smaller, shard=shard), 2, folder))
        print(f"two ranks, {shard}: {memory[shard]}", flush=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}"
    machine = {"date": date.today().isoformat(), "device": gpu, "torch": torch.__version__}
    return {"job": asdict(job), "memory_job": asdict(smaller), "seconds": seconds, "memory": memory, **machine}


def make_tables(found: dict[str, Any]) -> str:
    """Returns the measurements as Markdown."""
    job, smaller = Job(**found["job"]), Job(**found["memory_job"])
    base = statistics.median(found["seconds"]["one process"])
    lines = [
        f"{found['date']}, {found['device']}, torch {found['torch']}, {job.shape}, {job.dtype}, {job.samples} samples "
        f"per prompt, {job.prompt_tokens} + {job.completion_tokens} tokens. Steps of {job.prompts} prompts:",
        "",
        "| | step, s (median) | fastest to slowest | against one process |",
        "|---|---:|---:|---:|",
    ]
    for side, values in found["seconds"].items():
        middle = statistics.median(values)
        spread = f"{min(values):.3f} to {max(values):.3f}"
        lines.append(f"| {side} | {middle:.3f} | {spread} | {100 * (middle / base - 1):+.1f}% |")
    lines += [
        "",
        f"Updates on {smaller.prompts} prompts on two ranks that share the GPU, GiB per rank:",
        "",
        "| shard | tokens | state planned | measured | peak planned | measured, by rank | plan off by |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for shard, value in found["memory"].items():
        one = Found(**value)
        if not one.measured:
            lines.append(f"| {shard} | {one.tokens} | | | | | |")
            continue
        peaks = ", ".join(f"{peak:.2f}" for peak in one.measured)
        off = max((100 * (p / m - 1) for p, m in zip(one.planned, one.measured, strict=True)), key=abs)
        state = f"{one.state_planned:.2f} | {one.state_measured:.2f}"
        lines.append(f"| {shard} | {one.tokens} | {state} | {max(one.planned):.2f} | {peaks} | {off:+.1f}% |")
    return "\n".join(lines)


def main() -> None:
    """Measures, writes JSON, and prints two tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Job()).items():
        if name not in ("shard", "measures_memory"):
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--divisions", nargs="*", choices=DIVISIONS, default=list(DIVISIONS))
    parser.add_argument("--out", type=Path, help="file for the measurements")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of an earlier measurement")
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.job:
        run_rank(Job(**json.loads(a.job)), a.found)
        return
    if a.show:
        print(make_tables(json.loads(a.show.read_text())))
        return
    job = Job(**{name: getattr(a, name) for name in asdict(Job()) if hasattr(a, name)})
    with tempfile.TemporaryDirectory() as folder:
        found = measure(job, a.turns, a.divisions, Path(folder))
    if a.out:
        a.out.write_text(json.dumps(found))
    print(make_tables(found))


if __name__ == "__main__":
    main()
