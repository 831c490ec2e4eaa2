"""Whole steps in this process: a small run of the bundled model, assembled as `cohort train` does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cohort import build
from cohort.algos.algorithm import Loss
from cohort.build import Parts
from cohort.config.kinds import RL
from cohort.config.schema import BatchConfig, EvalConfig, LearnerConfig, SamplingConfig
from cohort.data.batch import Batch, Microbatch
from cohort.learner.local import LocalLearner
from cohort.loops.job import StepRecord
from cohort.loops.replay import Replay
from cohort.loops.rl import train
from cohort.recipes.tiny import quickstart
from cohort.tasks.arithmetic import Arithmetic
from cohort.types import Answer, Group, Outcome, Row


def small_run(**changes: Any) -> RL:
    """The quickstart with less of everything. One thread: what else runs on the machine changes nothing."""
    values = {
        "threads": 1,
        "task": Arithmetic(train_size=24, test_size=12),
        "batch": BatchConfig(prompts=6, samples=4),
        "sampling": SamplingConfig(max_tokens=32),
        "learner": LearnerConfig(token_budget=512),
        "eval": EvalConfig(problems=6),
    }
    return replace(quickstart(), **{**values, **changes})


@contextmanager
def preserved() -> Iterator[None]:
    """Leave torch's threads and determinism as they were found: a run sets them for its whole process."""
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)


@contextmanager
def assembled(config: RL) -> Iterator[Parts]:
    """The parts of a run, closed afterwards."""
    with preserved():
        parts = build.assemble(config)
        try:
            yield parts
        finally:
            parts.close()


@dataclass
class Steps:
    """What the loop needs of a `Run`, without a directory: remembers what every step ended with."""

    first: int
    num: int
    ended: list[tuple[list[Group], StepRecord]] = field(default_factory=list)

    def steps(self) -> Iterator[int]:
        for step in range(self.first, self.first + self.num):
            yield step
            assert len(self.ended) == step + 1 - self.first

    def end_step(self, step: int, record: StepRecord) -> None:
        assert step == self.first + len(self.ended) and record.groups is not None
        self.ended.append((list(record.groups), record))


def run_steps(parts: Parts, num: int, first: int = 0) -> list[tuple[list[Group], StepRecord]]:
    """`num` steps of the real loop."""
    run = Steps(first, num)
    replay = Replay(parts.config.replay, parts.config.seed, Path())  # nothing is kept here
    train(run, parts.config, parts.engine, parts.learner, parts.tasks, parts.algo, replay)
    return run.ended


class Grader:
    """A scoring pool in this process: `grade(row, answer) -> Outcome`, given back `late` polls later, last first."""

    def __init__(self, grade: Any, late: int = 0) -> None:
        self.grade, self.late = grade, late
        self.seen: dict[str, Answer] = {}
        self._held: list[tuple[str, Outcome]] = []
        self._polls = 0

    def submit(self, id: str, row: Row, answer: Answer) -> None:
        assert id not in self.seen or id not in dict(self._held), f"{id} twice"
        self.seen[id] = answer
        self._held.append((id, self.grade(row, answer)))

    def poll(self, timeout: float) -> list[tuple[str, Outcome]]:
        self._polls += 1
        if self._polls % (self.late + 1):
            return []
        held, self._held = self._held[::-1], []
        return held


def gradient_rows(learner: LocalLearner, batch: Batch, loss: Loss) -> list[tuple[Microbatch, set[int]]]:
    """Each microbatch with the rows of its final hidden states that got a gradient: the predictions the loss used."""
    seen: list[Any] = []

    def watch(module: Any, inputs: Any, hidden: Any) -> None:
        hidden.retain_grad()
        seen.append(hidden)

    handle = learner.decoder.register_forward_hook(watch)
    try:
        learner.forward_backward(batch.minibatches[0], loss)
    finally:
        handle.remove()
    touched = [set(h.grad.abs().sum(-1).nonzero()[:, 0].tolist()) for h in seen]
    return list(zip(batch.minibatches[0].microbatches, touched, strict=True))
