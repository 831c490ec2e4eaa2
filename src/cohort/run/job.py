"""The protocols between a run, its job and its training loop, and the record of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cohort.evaluation.records import Evaluation
from cohort.logs.view import Showcase
from cohort.loops.stats import choose_showcase, summarise_failures
from cohort.run.checkpoint import Checkpoint
from cohort.run.store.records import RunDescription
from cohort.types import Group


@dataclass(kw_only=True, slots=True)
class StepRecord:
    """What a run records of a step. Everything but the metrics is optional."""

    metrics: Mapping[str, float]
    # Trained and excluded groups. All go into the step's rollout file, those sampled in this step also into run.db.
    # None = the step has no rollout file.
    groups: Sequence[Group] | None = None
    showcase: Showcase | None = None  # one sample to show the user
    problem: str = ""  # what failed, in one line; "" = nothing
    has_signal: bool = True  # whether any sample of the step had an advantage, so that its reward teaches something


def make_step_record(step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> StepRecord:
    """Returns what the run records of a step: its groups, its metrics, one sample to show and a line about failures.

    `step` counts from 0. `groups` are those that the step trained on, and those that were excluded. Sample, failures
    and signal come only from groups that were sampled in this step, not from reused ones.
    """
    # Reused groups are on record with the step that sampled them.
    fresh = [g for g in groups if not g.reused]
    return StepRecord(
        metrics=metrics,
        groups=groups,
        showcase=choose_showcase(step + 1, fresh),
        problem=summarise_failures(fresh),
        has_signal=any(sample.advantage for group in fresh for sample in group.samples),
    )


class Job(Protocol):
    """What is trained in a run, as the run sees it. `step` counts completed steps: 0 = untrained."""

    @property
    def evaluate(self) -> Callable[[int], Evaluation | None] | None:
        """A function that evaluates the current weights, given the number of completed steps; None = no evaluation.

        All ranks call it. It returns the evaluation on the first, and None on the others.
        """

    @property
    def measure(self) -> Callable[[], Mapping[str, float]] | None:
        """A function that measures the current weights on held-out examples; None = nothing is measured.

        It returns metrics whose names begin with "eval/", such as a loss. They have no interval and choose no
        checkpoint.
        """

    def prepare(self, run: Path) -> list[tuple[str, str]]:
        """Gets ready what depends on the untrained model, before a checkpoint is restored, and keeps it in `run`.

        That is the run directory, which the caller has locked. Returns (kind, text) of what to tell the user.
        """

    def make_checkpoint(self, step: int) -> Checkpoint:
        """Returns the state of the job after `step` completed steps, except the weights, which `write_model` writes."""

    def write_model(self, folder: Path) -> None:
        """Writes the current weights, config and tokenizer into `folder`, as a Hugging Face model folder."""

    def restore(self, state: Checkpoint) -> None:
        """Restores a checkpoint, the weights in its `model` folder included.

        Raises CohortError if the checkpoint does not fit this job.
        """

    def describe(self) -> RunDescription:
        """Returns what terminal and run card say about the run: task, algorithm, batch, and which metrics to show."""

    def describe_extension(self, step: int, old_steps: int, new_steps: int) -> str:
        """Returns what changes in the training if the run has `new_steps` steps in place of `old_steps`; "" = nothing.

        `step` is the number of completed steps, whose checkpoint is restored.
        """

    def suggest_commands(self, run: Path, step: int) -> list[list[str]]:
        """Returns commands to try after the run in directory `run` is complete, each as a list of words.

        `step` is the number of completed steps.
        """


class TrainingRun(Protocol):
    """The part of a run that a training loop uses."""

    def steps(self) -> Iterator[int]:
        """Yields the number of each remaining step, counted from 0. The loop must end each step with `end_step`."""

    def end_step(self, step: int, record: StepRecord) -> None:
        """Records a step, counted from 0, and evaluates and saves a checkpoint when they are due."""
