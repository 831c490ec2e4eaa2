"""metrics.jsonl: the metrics of run.db as JSON lines, for programs that do not read SQLite."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from cohort.logs.jsonlines import replace_non_finite
from cohort.run.store.reader import Reader
from cohort.run.store.records import MetricRow
from cohort.system.disk import explain_disk_errors, write_atomically


class MetricsFile:
    """The file metrics.jsonl, with one line per step and one per evaluation. All values are read from run.db."""

    def __init__(self, path: Path, database: Path) -> None:
        self.path = path
        self._database = database
        self._last_id = 0  # id of the newest row that is in the file
        self._evaluated_steps: set[int] = set()  # steps whose evaluation is in the file

    def rewrite(self) -> None:
        """Writes the whole file anew from run.db, atomically.

        This removes steps that a resume took back and an incomplete line that a kill left.
        """
        self._last_id = 0
        self._evaluated_steps = set()
        write_atomically(self.path, "".join(self._format_lines(self._read_new_rows())))

    def append(self) -> None:
        """Appends lines for the rows that run.db got since the last `append` or `rewrite`.

        Writes the whole file anew if an evaluation that it has was made again.
        """
        rows = self._read_new_rows()
        if any(row.step in self._evaluated_steps for row in rows if _is_evaluation(row)):
            # After a kill, this evaluation was made again and its rows were replaced.
            self.rewrite()
            return
        with explain_disk_errors(self.path), open(self.path, "a", encoding="ascii") as file:
            file.write("".join(self._format_lines(rows)))

    def _read_new_rows(self) -> list[MetricRow]:
        """Returns the rows of run.db that are newer than the last row in the file."""
        with Reader(self._database) as reader:
            return reader.read_metrics(after=self._last_id)

    def _format_lines(self, rows: Sequence[MetricRow]) -> Iterator[str]:
        """Yields one JSON line per step and per evaluation in `rows`, and records that it is in the file.

        NaN and infinity become null. Each line ends with a line break.
        """
        # Rows of one step are neighbours in run.db, and so are those of one evaluation.
        for (step, of_evaluation), group in groupby(rows, key=lambda row: (row.step, _is_evaluation(row))):
            members = list(group)
            metrics = {row.name: row.value for row in members}
            yield json.dumps(replace_non_finite({"step": step, "time": members[0].time, "metrics": metrics})) + "\n"
            self._last_id = members[-1].id
            if of_evaluation:
                self._evaluated_steps.add(step)


def _is_evaluation(row: MetricRow) -> bool:
    """Returns whether a row is a metric of an evaluation (its name begins with "eval/"), not of a step."""
    return row.name.startswith("eval/")
