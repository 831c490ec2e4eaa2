"""The run of every rank but the first: the same steps, and nothing recorded."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from cohort.config.schema import RunConfig
from cohort.run import checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.job import Job, StepRecord


class SilentRun:
    """Goes where `Run` goes: from the newest checkpoint to the last step. It writes no file and takes no lock."""

    def __init__(self, directory: RunDirectory, config: RunConfig, job: Job) -> None:
        self.directory, self.config = directory, config
        self.step = 0  # completed
        self._job = job

    def __enter__(self) -> SilentRun:
        path = checkpoint.latest(self.directory.checkpoints)
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
        while self.step < self.config.steps:
            step = self.step
            yield step
            assert self.step == step + 1, f"step {step} did not end with end_step"

    def end_step(self, step: int, record: StepRecord) -> None:
        assert step == self.step, f"step {step} ended while step {self.step} was under way"
        self.step = step + 1

    def event(self, kind: str, text: str) -> None:
        """The first rank tells it."""

    def notice(self, kind: str, text: str) -> None:
        """The first rank tells it."""

    def finish(self) -> None:
        """The first rank saves, and says how it went."""
