"""One JSON object a line, for programs."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from typing import Any, TextIO

from cohort.evaluation.records import Evaluation
from cohort.logs.view import Header, StepReport, Summary

_UNTOLD = ("curve", "values", "evaluates", "evaluations", "config")  # of the header: all of it is in the run directory


class JsonView:
    """Every line has `kind` and `time`; NaN and infinity, which JSON lacks, are null. Pure ASCII."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, header: Header) -> None:
        self._write("start", **{k: v for k, v in asdict(header).items() if k not in _UNTOLD})

    def phase(self, name: str) -> None:
        pass

    def step(self, report: StepReport) -> None:
        self._write("step", step=report.step, num_steps=report.num_steps, eta=report.eta, metrics=report.metrics)

    def evaluation(self, evaluation: Evaluation) -> None:
        fields = {k: v for k, v in evaluation.to_json().items() if k != "items"}
        self._write("evaluation", **fields)

    def event(self, step: int, kind: str, text: str) -> None:
        self._write("event", step=step, event=kind, text=text)

    def finish(self, summary: Summary) -> None:
        self._write(
            "finish",
            path=summary.path,
            step=summary.step,
            num_steps=summary.num_steps,
            seconds=summary.seconds,
            complete=summary.complete,
            before=summary.first.accuracy if summary.first else None,
            after=summary.last.accuracy if summary.last else None,
        )

    def close(self) -> None:
        self._stream.flush()

    def _write(self, kind: str, **fields: Any) -> None:
        line = json.dumps(finite({"kind": kind, "time": time.time(), **fields}), allow_nan=False)
        self._stream.write(line + "\n")
        self._stream.flush()


def finite(value: Any) -> Any:
    """`value` with None for every number that JSON lacks.

    >>> finite({"loss": float("nan"), "lr": [0.5, float("inf")]})
    {'loss': None, 'lr': [0.5, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
