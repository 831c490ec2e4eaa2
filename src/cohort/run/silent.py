"""The run of every rank but the first: it does the same steps and records nothing."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from cohort.config.schema import RunConfig
from cohort.run import checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.job import Job, StepRecord


class SilentRun:
    """A run that goes from the newest checkpoint to the last step, as `Run` does, but writes and shows nothing.

    It takes no lock, does not evaluate, and does not react to stop signals.
    """

    def __init__(self, directory: RunDirectory, config: RunConfig, job: Job) -> None:
        self.directory = directory
        self.config = config
        self.step = 0  # completed
        self._job = job

    def __enter__(self) -> SilentRun:
        # All ranks restore the same checkpoint.
        path = checkpoint.find_latest(self.directory.checkpoints)
        if path is not None:
            state = checkpoint.load(path)
            self._job.restore(state)
            self.step = state.step
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def steps(self) -> Iterator[int]:
        """Yields the number of each remaining step, counted from 0. The loop must end each step with `end_step`."""
        while self.step < self.config.steps:
            step = self.step
            yield step
            assert self.step == step + 1, f"step {step} did not end with end_step"

    def end_step(self, step: int, record: StepRecord) -> None:
        """Counts the step as completed. `record` is ignored: the process of the first rank records the step."""
        assert step == self.step, f"step {step} ended while step {self.step} was under way"
        self.step = step + 1

    def record_event(self, kind: str, text: str) -> None:
        """Does nothing: only the first of several processes shows and records events."""

    def show_notice(self, kind: str, text: str) -> None:
        """Does nothing: only the first of several processes shows notices."""

    def finish(self) -> None:
        """Does nothing: only the first of several processes saves the last checkpoint and writes the run card."""
