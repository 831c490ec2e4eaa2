"""metrics.jsonl: the metrics of run.db as lines that anything can read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from cohort.logs.jsonlines import finite
from cohort.run.store.reader import Reader
from cohort.run.store.records import MetricRow
from cohort.system.disk import disk_errors, write_atomic


class MetricsFile:
    """One line a step and one an evaluation, always taken from run.db, which alone says what happened."""

    def __init__(self, path: Path, database: Path) -> None:
        self.path = path
        self._database = database
        self._last = 0  # id of the newest row that is in the file
        self._evaluated: set[int] = set()  # steps whose evaluation is in the file

    def rewrite(self) -> None:
        """Make the file what run.db says: without steps that were taken back or half a line that a kill left."""
        self._last, self._evaluated = 0, set()
        write_atomic(self.path, "".join(self._lines(self._new_rows())))

    def append(self) -> None:
        """Add what run.db got since."""
        rows = self._new_rows()
        if any(row.step in self._evaluated for row in rows if _of_evaluation(row)):
            self.rewrite()  # made again after a kill, which replaced its rows
            return
        with disk_errors(self.path), open(self.path, "a", encoding="ascii") as file:
            file.write("".join(self._lines(rows)))

    def _new_rows(self) -> list[MetricRow]:
        with Reader(self._database) as reader:
            return reader.metrics(after=self._last)

    def _lines(self, rows: Sequence[MetricRow]) -> Iterator[str]:
        for (step, of_evaluation), group in groupby(rows, key=lambda row: (row.step, _of_evaluation(row))):
            members = list(group)
            metrics = {row.name: row.value for row in members}
            yield json.dumps(finite({"step": step, "time": members[0].time, "metrics": metrics})) + "\n"
            self._last = members[-1].id
            if of_evaluation:
                self._evaluated.add(step)


def _of_evaluation(row: MetricRow) -> bool:
    return row.name.startswith("eval/")
