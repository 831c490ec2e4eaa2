"""What a run and its loop ask of each other: the job, the record of a step, and the steps themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cohort.evaluation.records import Evaluation
from cohort.logs.view import Showcase
from cohort.loops.stats import failures, showcase
from cohort.run.checkpoint import Checkpoint
from cohort.run.store.records import About
from cohort.types import Group


@dataclass(kw_only=True, slots=True)
class StepRecord:
    """What is recorded of a step. All but the metrics is optional."""

    metrics: Mapping[str, float]
    groups: Sequence[Group] | None = None  # the rollouts: a file, and rows for those sampled in this step
    showcase: Showcase | None = None  # a sample worth reading
    problem: str = ""  # what failed, in one line


def rollout_record(step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> StepRecord:
    """The record of a step, counted from 0, that trained on these groups."""
    fresh = [g for g in groups if not g.reused]  # those used again are on record with the step that sampled them
    return StepRecord(metrics=metrics, groups=groups, showcase=showcase(step + 1, fresh), problem=failures(fresh))


class Job(Protocol):
    """What a run asks of what is trained in it. Step numbers count completed steps: 0 = untrained."""

    @property
    def evaluate(self) -> Callable[[int], Evaluation] | None:
        """Measures the weights now, after that many steps; None = this kind of run is not evaluated."""

    def checkpoint(self, step: int) -> Checkpoint:
        """The state now, after that many steps."""

    def write_model(self, folder: Path) -> None:
        """The weights now, as a Hugging Face folder."""

    def restore(self, state: Checkpoint) -> None:
        """Become that state; its `model` is the folder of the weights. May refuse, with a CohortError."""

    def about(self) -> About:
        """What the header and the card say."""

    def next_commands(self, run: Path, step: int) -> list[list[str]]:
        """Commands worth trying with the complete run in directory `run`, each as its words."""


class Steps(Protocol):
    """What a loop asks of a run."""

    def steps(self) -> Iterator[int]:
        """The steps still to do, counted from 0; each must end with `end_step`."""

    def end_step(self, step: int, record: StepRecord) -> None:
        """Record the step, evaluate and save when it is time."""
