"""metrics.jsonl: the metrics of run.db as JSON lines, for programs that do not read SQLite."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from cohort.errors import RunError
from cohort.logs.jsonlines import replace_non_finite
from cohort.run.store.reader import Reader
from cohort.run.store.records import MetricRow
from cohort.system.disk import explain_disk_errors, write_atomically
from cohort.system.json_text import parse_json

_EVALUATION_PREFIX = "eval/"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsLine:
    """One line of metrics.jsonl: the metrics of a step or of an evaluation."""

    step: int
    time: float  # seconds since 1970, UTC
    metrics: dict[str, float]  # NaN where the file has null

    @property
    def is_evaluation(self) -> bool:
        """Whether the line is of an evaluation, not of a step."""
        return any(name.startswith(_EVALUATION_PREFIX) for name in self.metrics)


def read_metrics_file(path: Path) -> tuple[list[MetricsLine], int]:
    """Returns the lines of the file metrics.jsonl, and the number of lines that cannot be read; ([], 0) without a file.

    An incomplete last line, which a kill leaves, is not counted. Raises RunError if the file itself cannot be read.
    """
    try:
        *complete, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}. Repair its permissions, or restore it from a copy.") from error
    lines = [_parse_line(line) for line in complete]
    return [line for line in lines if line is not None], lines.count(None)


def _parse_line(text: bytes) -> MetricsLine | None:
    """Returns a line of metrics.jsonl as a record; None if it is damaged."""
    try:
        value = parse_json(text)
        # NaN and infinity were written as null.
        metrics = {str(name): math.nan if v is None else float(v) for name, v in value["metrics"].items()}
        return MetricsLine(step=int(value["step"]), time=float(value["time"]), metrics=metrics)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_evaluation(row: MetricRow) -> bool:
    """Returns whether a row is a metric of an evaluation (its name begins with "eval/"), not of a step."""
    return row.name.startswith(_EVALUATION_PREFIX)
