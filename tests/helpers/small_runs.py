"""Whole steps in this process: a small run of the bundled model, built as `cohort train` builds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cohort.algos.algorithm import Loss
from cohort.config.kinds import RL
from cohort.config.schema import BatchConfig, EvalConfig, LearnerConfig, SamplingConfig
from cohort.data.batch import Microbatch
from cohort.jobs import build
from cohort.jobs.build import RLJob
from cohort.learner.local import LocalLearner
from cohort.loops.reuse import RolloutReuse
from cohort.loops.rl import train
from cohort.recipes.tiny import quickstart
from cohort.rollout.producer import Producer
from cohort.run.job import StepRecord
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.environment import AgainRules, Episodes, KeyedDraws, Opening, Past, Step, ThinkAgain
from cohort.types import Answer, Group, Outcome, Row
from tests.helpers.decoders_and_groups import PackedGroups


def small_run(**changes: Any) -> RL:
    """Returns the config of a small quickstart. It uses one thread, so that other load changes no result."""
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
def keep_torch_settings() -> Iterator[None]:
    """Restores torch's threads and determinism after the block, because a run sets them for the whole process."""
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)


@contextmanager
def built_job(config: RL) -> Iterator[RLJob]:
    """Yields the job of a config, which is closed afterwards."""
    with keep_torch_settings():
        job = build.build_rl_job(config)
        try:
            yield job
        finally:
            job.close()


@dataclass
class StepsInMemory:
    """A `TrainingRun` of `num` steps without a directory. It keeps the groups and the record of every step."""

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


def run_steps(job: RLJob, num: int, first: int = 0) -> list[tuple[list[Group], StepRecord]]:
    """Does `num` steps of the real loop, and returns (groups, record) per step."""
    run = StepsInMemory(first, num)
    replay = RolloutReuse(job.config.replay, job.config.seed, Path())  # no rollout files are read
    train(run, job.config, job.producer, job.learner, job.sync, job.algo, replay, job.mover)
    return run.ended


def make_producer(job: RLJob, group_size: int, **changes: Any) -> Producer:
    """Returns a producer as that of the job, with another group size, engine, scorer or order."""
    values: dict[str, Any] = {"engine": job.engine, "scorer": job.scorer, "stream": job.producer.stream}
    settings = replace(job.producer.settings, group_size=group_size)
    return Producer(**{**values, "settings": settings, **changes})


class FunctionEnvironment:
    """An environment of one turn that scores the answer with a function."""

    def __init__(self, grade: Any) -> None:
        self.grade = grade
        self.row: Row = {}

    def start(self, row: Row, draws: KeyedDraws) -> Opening:
        self.row = row
        return Opening(messages=[])

    def step(self, answer: Answer) -> Step:
        outcome = self.grade(self.row, answer)
        return Step(parts=None if outcome.failure else outcome.parts, reason=outcome.failure or outcome.reason)


class LocalScorer:
    """A scoring pool in this process. Outcomes come `late` polls later, newest first, to test that order is irrelevant.

    `grade(row, answer)` returns the outcome. `seen` has the newest answer by id.
    """

    scores_groups = False

    def __init__(self, grade: Any, late: int = 0, again: AgainRules | None = None) -> None:
        self.grade, self.late = grade, late
        make = (
            (lambda: FunctionEnvironment(grade))
            if again is None
            else (lambda: ThinkAgain(FunctionEnvironment(grade), again))
        )
        self.episodes = Episodes(make)
        self.seen: dict[str, Answer] = {}
        self._held: list[tuple[str, Outcome]] = []
        self._polls = 0

    def submit(self, id: str, row: Row, answer: Answer, past: Past | None = None, closing: str = "") -> None:
        assert id not in self.seen or id not in dict(self._held), f"{id} twice"
        self.seen[id] = answer
        self._held.append((id, self.grade(row, answer) if past is None else self._step(row, answer, past)))

    def submit_group(self, id: str, row: Row, answers: Sequence[Answer]) -> None:
        """Queues the answers of a group, which a class that `scores_groups` is given together."""
        assert self.scores_groups, "the producer must submit single answers here"
        for index, answer in enumerate(answers):
            self.submit(f"{id}/{index}", row, answer)

    def _step(self, row: Row, answer: Answer, past: Past) -> Outcome:
        step = self.episodes.step(row, past, answer)
        if step.parts is None:
            return Outcome(failure=step.reason)
        return Outcome(parts=step.parts, reason=step.reason, replies=step.replies, cost=step.cost)

    def drop(self, id: str) -> None:
        assert id in dict(self._held), f"{id} is not being scored"
        self._held = [held for held in self._held if held[0] != id]

    def poll(self, timeout: float = 0.0) -> list[tuple[str, Outcome]]:
        self._polls += 1
        if self._polls % (self.late + 1):
            return []
        held, self._held = self._held[::-1], []
        return held


def gradient_rows(learner: LocalLearner, batch: PackedGroups, loss: Loss) -> list[tuple[Microbatch, set[int]]]:
    """Returns (microbatch, rows of its last hidden states that got a gradient): the predictions that the loss used."""
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
