"""A run on several ranks. The first rank leads: it has the run directory, decides what is done next, and records it.

The others follow. They do the same steps, evaluations and checkpoints, because these need all ranks, and write nothing.
What the first rank is about to do, it tells the others first, as a `Command`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cohort.evaluation.records import Evaluation
from cohort.run.checkpoint import Checkpoint, assist_save
from cohort.run.job import Job, StepRecord
from cohort.run.signals import StopSignals
from cohort.serialize import record
from cohort.world import World


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What all ranks do next."""

    name: str  # prepare, restore and ready; then step, evaluate, measure and checkpoint; then end
    step: int = 0
    cursor: int = 0  # of a checkpoint to restore
    numbers: dict[str, Any] = field(default_factory=dict)  # of a checkpoint to restore
    complete: bool = False  # at the end: whether the last step is done


class LeadingJob:
    """The job of the first rank: it tells the other ranks before it does something that needs all of them."""

    def __init__(self, job: Job, world: World) -> None:
        self._job = job
        self._world = world

    def lead(self, command: Command) -> None:
        """Tells the other ranks what is done next."""
        if command.name == "step":
            self._world.progress.step = command.step + 1
            self._world.progress.phase = "a step"
        with self._world.phase(f"the wait for the next command ({command.name})"):
            self._world.share(command)

    def __getattr__(self, name: str) -> Any:
        """Returns what the job has: everything that is not below concerns the first rank alone."""
        return getattr(self._job, name)

    @property
    def evaluate(self) -> Callable[[int], Evaluation | None] | None:
        """A function that evaluates the current weights on all ranks; None = no evaluation."""
        found = self._job.evaluate
        if found is None:
            return None

        def evaluate(step: int) -> Evaluation | None:
            """Returns the evaluation after `step` completed steps."""
            self.lead(Command(name="evaluate", step=step))
            return found(step)

        return evaluate

    @property
    def measure(self) -> Callable[[], Mapping[str, float]] | None:
        """A function that measures the held-out examples on all ranks; None = nothing is measured."""
        found = self._job.measure
        if found is None:
            return None

        def measure() -> Mapping[str, float]:
            """Returns the metrics of the held-out examples."""
            self.lead(Command(name="measure"))
            return found()

        return measure

    def prepare(self, run: Path) -> list[tuple[str, str]]:
        """Gets all ranks ready. See `Job.prepare`."""
        self.lead(Command(name="prepare"))
        return self._job.prepare(run)

    def make_checkpoint(self, step: int) -> Checkpoint:
        """Returns the state of the job on all ranks after `step` completed steps. The caller must read its tensors."""
        self.lead(Command(name="checkpoint", step=step))
        # Its tensors are gathered later, while it is written: no other phase comes between.
        self._world.progress.phase = "a checkpoint"
        return self._job.make_checkpoint(step)

    def restore(self, state: Checkpoint) -> None:
        """Restores a checkpoint on all ranks. Only this rank sees its files."""
        self.lead(Command(name="restore", step=state.step, cursor=state.cursor, numbers=state.numbers))
        self._job.restore(state)


class FollowingRun:
    """The run of every rank but the first: it does what the first rank says, and writes and shows nothing."""

    directory = None  # only the first rank has it

    def __init__(self, job: Job, world: World) -> None:
        self.step = 0  # completed
        self.evaluations: dict[int, Evaluation] = {}
        self.is_complete = False  # whether the first rank has said that all steps are done
        self._job = job
        self._world = world
        self._signals = StopSignals()

    def __enter__(self) -> FollowingRun:
        self._signals.install(silent=True)
        # The first rank prepares the job and restores a checkpoint before the loop begins.
        self._follow()
        return self

    def __exit__(self, *exc: object) -> None:
        self._signals.restore()

    def steps(self) -> Iterator[int]:
        """Yields the number of each step that the first rank begins. The loop must end each step with `end_step`."""
        while (step := self._follow()) is not None:
            yield step
            assert self.step == step + 1, f"step {step} did not end with end_step"

    def _follow(self) -> int | None:
        """Does what the first rank says until it begins a step, whose number it returns.

        Returns None when the first rank is ready for the loop, and when the run has ended.
        """
        while True:
            with self._world.phase("the wait for the next command"):
                command = self._world.share(None)
            if command.name == "step":
                self._world.progress.step = command.step + 1
                return int(command.step)
            if command.name in ("ready", "end"):
                self.is_complete = command.complete
                return None
            self._obey(command)

    def _obey(self, command: Command) -> None:
        """Takes part in what needs all ranks, besides a step."""
        job = self._job
        if command.name == "evaluate":
            assert job.evaluate is not None
            job.evaluate(command.step)
        elif command.name == "measure":
            assert job.measure is not None
            job.measure()
        elif command.name == "prepare":
            job.prepare(Path())
        elif command.name == "checkpoint":
            with self._world.phase("a checkpoint"):
                assist_save(job.make_checkpoint(command.step))
        elif command.name == "restore":
            job.restore(Checkpoint(step=command.step, cursor=command.cursor, numbers=command.numbers))
            self.step = command.step
        else:
            raise AssertionError(f"the first rank says {command.name}, which this rank does not know")

    def end_step(self, step: int, record: StepRecord) -> None:
        """Counts the step as completed, and tells the first rank whether a signal asks to stop. `record` is ignored."""
        assert step == self.step, f"step {step} ended while step {self.step} was under way"
        self.step = step + 1
        agree_on_stop(self._signals, self._world)

    def record_event(self, kind: str, text: str) -> None:
        """Does nothing: only the first rank shows and records events."""

    def show_notice(self, kind: str, text: str) -> None:
        """Does nothing: only the first rank shows notices."""


def agree_on_stop(signals: StopSignals, world: World) -> None:
    """Makes a signal that any rank has got a signal of all ranks. Every rank must call it."""
    with world.phase("the end of a step"):
        heard = [name for name in world.gather(signals.requested) if name]
    if heard and not signals.requested:
        signals.requested = heard[0]
