"""View of a run for programs: one JSON object per line."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from typing import Any, TextIO

from cohort.evaluation.records import Evaluation
from cohort.logs.view import Header, StepReport, Summary

# Fields of the header that are not printed, because the run directory has all of them.
_OMITTED = ("curve", "values", "has_evaluation", "measured", "evaluations", "config")


class JsonView:
    """Prints JSON lines in pure ASCII. Every line has `kind` and `time`. NaN and infinity become null."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, header: Header) -> None:
        """Prints a line of the kind "start" with the facts of the header, without curve, evaluations and config.

        The values of the curve and whether the run has evaluations are left out too.
        """
        self._write("start", **{k: v for k, v in asdict(header).items() if k not in _OMITTED})

    def show_phase(self, name: str) -> None:
        """Does nothing: phases are not printed."""

    def show_step(self, report: StepReport) -> None:
        """Prints a line of the kind "step" with the step's number, all steps, remaining seconds and all metrics."""
        self._write("step", step=report.step, num_steps=report.num_steps, eta=report.eta, metrics=report.metrics)

    def show_evaluation(self, evaluation: Evaluation) -> None:
        """Prints a line of the kind "evaluation" with the results, without the answers to single problems."""
        # The answers to all problems are left out: they are long, and the run directory has them.
        fields = {k: v for k, v in evaluation.to_json().items() if k != "items"}
        self._write("evaluation", **fields)

    def show_event(self, step: int, kind: str, text: str) -> None:
        """Prints a line of the kind "event" with step, kind of event and text."""
        self._write("event", step=step, event=kind, text=text)

    def finish(self, summary: Summary) -> None:
        """Prints a line of the kind "finish": run directory, steps, seconds, whether complete, held-out accuracy.

        "before" is the accuracy, or mean reward, of the first evaluation, "after" that of the last; null if not
        evaluated. "before" is also null if the two have different graders.
        """
        first, last = summary.first, summary.last
        self._write(
            "finish",
            path=summary.path,
            step=summary.step,
            num_steps=summary.num_steps,
            seconds=summary.seconds,
            complete=summary.complete,
            before=first.value if first and last and first.setting.grader == last.setting.grader else None,
            after=last.value if last else None,
        )

    def close(self) -> None:
        """Flushes the stream. Does not close it."""
        self._stream.flush()

    def _write(self, kind: str, **fields: Any) -> None:
        """Prints `fields` as one JSON line with `kind` and the time, and flushes it.

        A program that reads a pipe gets the line at once.
        """
        line = json.dumps(replace_non_finite({"kind": kind, "time": time.time(), **fields}), allow_nan=False)
        self._stream.write(line + "\n")
        self._stream.flush()


def replace_non_finite(value: Any) -> Any:
    """Returns a copy of `value` with None in place of NaN and infinity, which JSON lacks.

    Looks into dicts, lists and tuples; tuples become lists. Other objects are returned unchanged.

    >>> replace_non_finite({"loss": float("nan"), "lr": [0.5, float("inf")]})
    {'loss': None, 'lr': [0.5, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: replace_non_finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(v) for v in value]
    return value
