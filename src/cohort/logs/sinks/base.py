"""What sinks share: they pass on the rows of metrics.jsonl, those of the steps before a resume included."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cohort.evaluation.records import Evaluation
from cohort.logs.view import Header, StepReport, Summary


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkRow:
    """The numbers of a step or of an evaluation."""

    number: int  # counts the lines of metrics.jsonl, from 0
    step: int
    time: float
    metrics: Mapping[str, float]

    @property
    def of_evaluation(self) -> bool:
        return any(name.startswith("eval/") for name in self.metrics)


class Sink:
    """A view that shows nothing and passes rows on.

    Every start passes on the whole run so far, and `has` leaves out what is there already. So nothing is missing
    that a kill swallowed on its way, or that happened while the sink was not in use, and nothing is there twice.
    """

    def connect(self, header: Header) -> None:
        raise NotImplementedError

    def has(self, row: SinkRow) -> bool:
        """Whether the row is there already, from before this start."""
        return False

    def write(self, row: SinkRow) -> None:
        raise NotImplementedError

    def stop(self, ended_well: bool) -> None:
        """Hand everything over; called once or more often, also when `connect` was not or failed."""
        raise NotImplementedError

    def start(self, header: Header) -> None:
        self._num_rows = 0
        self.connect(header)
        for row in read_rows(Path(header.path) / "metrics.jsonl"):
            self._pass_on(row)

    def phase(self, name: str) -> None:
        pass

    def step(self, report: StepReport) -> None:
        self._pass_on(SinkRow(number=self._num_rows, step=report.step, time=time.time(), metrics=report.metrics))

    def evaluation(self, evaluation: Evaluation) -> None:
        metrics = evaluation.metrics
        self._pass_on(SinkRow(number=self._num_rows, step=evaluation.step, time=time.time(), metrics=metrics))

    def event(self, step: int, kind: str, text: str) -> None:
        pass

    def finish(self, summary: Summary) -> None:
        self.stop(True)

    def close(self) -> None:
        self.stop(False)

    def _pass_on(self, row: SinkRow) -> None:
        self._num_rows = row.number + 1
        if not self.has(row):
            self.write(row)


def read_rows(path: Path) -> Iterator[SinkRow]:
    """The rows of a metrics.jsonl; null is a number that JSON lacks."""
    with open(path, encoding="ascii") as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            metrics = {name: math.nan if value is None else value for name, value in row["metrics"].items()}
            yield SinkRow(number=number, step=row["step"], time=row["time"], metrics=metrics)
