"""Steps of one rank and of several on the same machine: seconds, speed-up, and the bytes handed to collectives.

    python benchmarks/ranks.py --ranks 1 2 --shape smollm2-135m --prompts 16 --samples 8 --tokens 64

A step samples a batch, trains on it and hands the weights back to the engine, as a run does. Nothing is scored: rewards
alternate between 0 and 1. Every rank has one thread. The numbers of ranks take turns, so that a machine that gets
slower is slower for all. Weights are random. A second table has the stages of a step: seconds of the clock, and of the
processor, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch

from cohort.algos.algorithm import build_algorithm
from cohort.config.algos import GRPO
from cohort.config.engines import NativeEngine
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.engines.base import Request, sample
from cohort.engines.factory import EngineModel, make_engine
from cohort.learner.local import LocalLearner
from cohort.learner.optim import WholeOptimizer
from cohort.loops.rl import update_policy
from cohort.models.device import DTYPES
from cohort.models.shapes import find_shape, make_random_decoder
from cohort.ranks.groups import GroupMover
from cohort.ranks.join import join_ranks, leave_ranks
from cohort.ranks.launch import launch_ranks
from cohort.system.process import keep_freed_memory
from cohort.types import Group, Key, Prompt, Provenance, Sampling


def make_prompts(vocab: int, args: argparse.Namespace) -> list[Prompt]:
    """Returns the prompts of the batch, made of random tokens, the same on every rank."""
    rng = random.Random(0)
    return [
        Prompt(
            task="bench",
            id=str(n),
            visit=0,
            row={},
            messages=[],
            tokens=[rng.randrange(vocab) for _ in range(args.tokens)],
            provenance=[int(Provenance.PROMPT)] * args.tokens,
        )
        for n in range(args.prompts)
    ]


class Stages:
    """Seconds of the clock and of the processor, by stage, since the last `take`. A processor's are of all threads."""

    def __init__(self) -> None:
        self._totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Context whose seconds are those of the stage `name`. Stages inside it are not subtracted."""
        before = _read_clocks()
        yield
        for n, (start, end) in enumerate(zip(before, _read_clocks(), strict=True)):
            self._totals[name][n] += end - start

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Counts every call of a method of `owner` under the stage `name`."""
        call: Callable[..., Any] = getattr(owner, method)

        def watched(*args: Any, **options: Any) -> Any:
            """Calls the method."""
            with self.stage(name):
                return call(*args, **options)

        setattr(owner, method, watched)

    def take(self) -> dict[str, list[float]]:
        """Returns [seconds of the clock, of the processor] by stage, and begins again from zero."""
        found = dict(self._totals)
        self._totals.clear()
        return found


def _read_clocks() -> tuple[float, float]:
    """Returns the seconds of the clock, and those that this process had a processor."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), usage.ru_utime + usage.ru_stime


def run_rank(args: argparse.Namespace) -> None:
    """Does the steps of one rank. The first rank writes seconds and bytes per step to the file `args.out`."""
    torch.set_num_threads(1)
    # As every command does.
    keep_freed_memory()
    world = join_ranks("cpu")
    decoder = make_random_decoder(find_shape(args.shape), DTYPES[args.dtype], torch.device("cpu"))
    config = LearnerConfig(token_budget=4096, shard=args.shard)
    learner = LocalLearner(decoder, config, OptimConfig(lr=1e-6), num_updates=1, world=world)
    if args.overlap:
        assert isinstance(learner.optimizer, WholeOptimizer), "gradients are summed so with --shard none"
        learner.optimizer.overlaps = True
    subject = EngineModel(decoder=decoder, context=2 * args.tokens)
    engine = make_engine(NativeEngine(slots=args.prompts * args.samples), subject)
    algo = build_algorithm(GRPO(), args.tokens)
    mover = GroupMover(world)
    stages = Stages()
    stages.watch(learner, "_accumulate_gradients", "forward and backward")
    stages.watch(learner.optimizer, "reduce", "sum of gradients")
    stages.watch(learner, "optim_step", "optimizer step")
    own = make_prompts(decoder.config.vocab_size, args)[world.rank :: world.size]
    seconds, traffic, parts = [], [], []
    for number in range(args.repeats + 1):
        with stages.stage("wait"):
            world.gather(0)  # all begin together
        stages.take()
        before = dict(world.progress.bytes_by_kind)
        begin = time.perf_counter()
        requests = [
            Request(
                id=f"{p.id}/{i}",
                tokens=p.tokens,
                sampling=Sampling(max_tokens=args.tokens),
                key=Key(seed=0, purpose="bench", task="bench", prompt_id=p.id, visit=number, sample=i),
            )
            for p in own
            for i in range(args.samples)
        ]
        with stages.stage("sampling"):
            done = sample(engine, requests)
        groups = [Group(prompt=p, samples=[done[f"{p.id}/{i}"] for i in range(args.samples)]) for p in own]
        for group in groups:
            for i, member in enumerate(group.samples):
                member.reward = float(i % 2)
        with stages.stage("division of groups"):
            groups = mover.divide(groups)
        with stages.stage("the whole update"):
            update_policy(learner, algo, groups, config)
        engine.load(learner.weights(), version=number + 1)
        seconds.append(time.perf_counter() - begin)
        traffic.append({k: v - before.get(k, 0) for k, v in world.progress.bytes_by_kind.items()})
        parts.append(world.gather(stages.take()))
    if world.is_first:
        # The first step warms up.
        found = {"seconds": seconds[1:], "bytes": traffic[-1], "stages": parts[1:]}
        Path(args.out).write_text(json.dumps(found))
    leave_ranks()


def print_stages(parts: dict[int, list[list[dict[str, list[float]]]]]) -> None:
    """Prints a table of the stages of a step, as medians over all steps and ranks.

    `parts` has, by number of ranks, a list of steps, and per step what `Stages.take` returned on each rank.
    """
    print("\n| stage | " + " | ".join(f"{num} x 1: s | CPU s" for num in parts) + " |")
    print("|---|" + "---:|---:|" * len(parts))
    for name in next(iter(parts.values()))[0][0]:
        cells = []
        for steps in parts.values():
            found = [stages[name] for step in steps for stages in step]
            cells += [f"{statistics.median(column):.2f}" for column in zip(*found, strict=True)]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    """Measures each number of ranks in turn, and prints two tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shard", default="none")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of a prompt, and of a completion")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=2, help="steps per turn, after one that is not counted")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--overlap", action="store_true", help="begin sums of gradients during the backward pass")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    if args.out:
        run_rank(args)
        return
    seconds: dict[int, list[float]] = {num: [] for num in args.ranks}
    traffic: dict[int, dict[str, int]] = {}
    parts: dict[int, list[list[dict[str, list[float]]]]] = {num: [] for num in args.ranks}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.turns):
            for num in args.ranks:
                out = Path(folder) / "result.json"
                if launch_ranks([*sys.argv[1:], "--out", str(out)], num, program=[__file__]):
                    raise SystemExit(f"{num} ranks failed")
                found = json.loads(out.read_text())
                seconds[num] += found["seconds"]
                traffic[num] = found["bytes"]
                parts[num] += found["stages"]
    load = os.getloadavg()[0]
    print(
        f"{date.today()}, {args.shape}, {args.prompts} x {args.samples}, {args.tokens}/{args.tokens} tokens, ", end=""
    )
    print("sums of gradients during the backward, " if args.overlap else "", end="")
    print(f"{args.dtype}, shard {args.shard}, torch {torch.__version__}, Python {platform.python_version()}, ", end="")
    print(f"{os.cpu_count()} cores, load {load:.1f}\n")
    print("| ranks x 1 thread | step s (median) | fastest to slowest | speed-up | bytes to collectives per step |")
    print("|---:|---:|---:|---:|---:|")
    base = statistics.median(seconds[args.ranks[0]])
    for num, values in seconds.items():
        middle = statistics.median(values)
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"| {num} | {middle:.2f} | {spread} | {base / middle:.2f} | {sum(traffic[num].values()):,} |")
    print_stages(parts)


if __name__ == "__main__":
    main()
