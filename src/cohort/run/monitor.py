"""Warnings about the steps of a run: rewards that teach nothing for long, and updates that are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cohort.loops.stats import describe_bad_updates, describe_dead_steps
from cohort.run.job import StepRecord
from cohort.run.store.reader import Reader

DEAD_STEPS = 10  # steps in a row without a signal after which a run warns


class StepMonitor:
    """Watches the steps of a run whose database is `database`, and warns.

    After a resume the database knows what came before, so warnings come at the same steps as without an interruption.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._last_signal: int | None = None  # the last step whose rewards taught something; None = not known yet
        self._has_bad_updates = False  # whether this process has skipped an update

    def check_step(self, number: int, record: StepRecord) -> Iterator[tuple[str, str]]:
        """Yields (kind, text) of every event that the step `number`, which is not recorded yet, gives rise to."""
        if num_dead := self._count_dead_steps(number, record):
            yield "signal", describe_dead_steps(num_dead, record.metrics)
        num_bad = int(record.metrics.get("updates/bad", 0))
        if num_bad and self._is_first_bad():
            yield "update", describe_bad_updates(num_bad)

    def _count_dead_steps(self, number: int, record: StepRecord) -> int:
        """Returns how many steps in a row had no signal, if that are ten, twenty or so on; else 0."""
        if record.has_signal:
            self._last_signal = number
            return 0
        if self._last_signal is None:
            with Reader(self._database) as reader:
                self._last_signal = reader.find_last_signal()
        num_dead = number - self._last_signal
        return num_dead if num_dead % DEAD_STEPS == 0 else 0

    def _is_first_bad(self) -> bool:
        """Returns whether no earlier step of the run has skipped an update. Later calls return False."""
        if self._has_bad_updates:
            return False
        self._has_bad_updates = True
        with Reader(self._database) as reader:
            return not any(reader.read_series("updates/bad").values())
