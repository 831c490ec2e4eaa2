"""Base of all sinks: passes on the rows of metrics.jsonl, those from before a resume included."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cohort.evaluation.records import Evaluation
from cohort.logs.view import Header, StepReport, Summary
from cohort.system.json_text import parse_json


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkRow:
    """Metrics of a step or of an evaluation: one line of metrics.jsonl."""

    number: int  # of the line in metrics.jsonl, from 0
    step: int
    time: float  # seconds since 1970
    metrics: Mapping[str, float]

    @property
    def is_evaluation(self) -> bool:
        """Whether the row has the metrics of an evaluation, not of a step."""
        return any(name.startswith("eval/") for name in self.metrics)


class Sink:
    """A view that shows nothing and sends rows to another program.

    Every start sends the whole run so far, without the rows that the program has already (`has_row`). So no row is
    there twice, and none is missing: not one that a kill lost, nor one recorded while the sink was not in use.
    """

    def connect(self, header: Header) -> None:
        """Imports the program's package and opens or continues the run there. Each sink implements this."""
        raise NotImplementedError

    def has_row(self, row: SinkRow) -> bool:
        """Returns whether the program has the row already, from before this start. False unless a sink overrides it."""
        return False

    def write_row(self, row: SinkRow) -> None:
        """Sends one row to the program. Each sink implements this."""
        raise NotImplementedError

    def stop(self, ended_well: bool) -> None:
        """Sends what is pending and disconnects. `ended_well` is False if the run failed.

        Each sink implements this. It may be called several times, and also if `connect` failed or was never called.
        """
        raise NotImplementedError

    def start(self, header: Header) -> None:
        """Connects to the program and sends it the rows of metrics.jsonl that it lacks."""
        self._num_rows = 0
        self.connect(header)
        # The file has every row up to now, also those from before a resume.
        for row in read_rows(Path(header.path) / "metrics.jsonl"):
            self._send_if_new(row)

    def show_phase(self, name: str) -> None:
        """Does nothing: phases are not sent."""

    def show_step(self, report: StepReport) -> None:
        """Sends the metrics of a finished step."""
        self._send_if_new(SinkRow(number=self._num_rows, step=report.step, time=time.time(), metrics=report.metrics))

    def show_evaluation(self, evaluation: Evaluation) -> None:
        """Sends the metrics of a finished evaluation, as a row of its own."""
        metrics = evaluation.metrics
        self._send_if_new(SinkRow(number=self._num_rows, step=evaluation.step, time=time.time(), metrics=metrics))

    def show_event(self, step: int, kind: str, text: str) -> None:
        """Does nothing: events are not sent."""

    def finish(self, summary: Summary) -> None:
        """Disconnects from the program and tells it that the run ended well, also if a signal stopped it early."""
        self.stop(True)

    def close(self) -> None:
        """Disconnects from the program and tells it that the run failed. Does nothing after `finish`."""
        self.stop(False)

    def _send_if_new(self, row: SinkRow) -> None:
        """Sends a row unless the program had it before this start. Counts it in both cases."""
        # A row that is not sent is counted too: the number is that of its line in metrics.jsonl.
        self._num_rows = row.number + 1
        if not self.has_row(row):
            self.write_row(row)


def read_rows(path: Path) -> Iterator[SinkRow]:
    """Yields the rows of the metrics.jsonl at `path`, numbered from 0. A null in it becomes NaN.

    Raises OSError if the file cannot be read.
    """
    with open(path, encoding="ascii") as lines:
        for number, line in enumerate(lines):
            row = parse_json(line)
            metrics = {name: math.nan if value is None else value for name, value in row["metrics"].items()}
            yield SinkRow(number=number, step=row["step"], time=row["time"], metrics=metrics)
