"""The progress of a sweep as lines: when a run starts and ends, and now and then where it is."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress

from cohort.logs.numbers import format_compact, format_duration
from cohort.logs.printing import print_note
from cohort.sweep.directory import RunResult
from cohort.sweep.plan import PlannedRun
from cohort.sweep.process import Report

LINE_SECONDS = 10.0  # between two lines about the same run


class LineProgress:
    """Prints a line to standard error when a run begins, ends and, at most every ten seconds, where it is."""

    def __init__(self, num_runs: int, num_done: int = 0) -> None:
        self._num_runs = num_runs
        self._num_ended = num_done
        self._last_lines: dict[int, float] = {}  # when the last line about a run was printed, by number

    def begin_run(self, run: PlannedRun) -> None:
        """Prints that a run begins or goes on."""
        self._last_lines[run.number] = time.monotonic()
        self._print_line(run, "starts")

    def show_report(self, run: PlannedRun, report: Report) -> None:
        """Prints step, reward and remaining time of a run, unless a line about it was printed just before."""
        now = time.monotonic()
        if text := describe_report(report):
            is_rare = report.get("kind") != "step"
            if is_rare or now - self._last_lines.get(run.number, -math.inf) >= LINE_SECONDS:
                self._last_lines[run.number] = now
                self._print_line(run, text)

    def end_run(self, run: PlannedRun, result: RunResult | None, is_saved: bool) -> None:
        """Prints how a run ended, and how many have."""
        self._num_ended += result is not None
        text = describe_result(result, is_saved)
        self._print_line(run, f"{text} ({self._num_ended} of {self._num_runs} runs have ended)")

    def _print_line(self, run: PlannedRun, text: str) -> None:
        """Prints one line about a run. If the reader of a pipe has left, the sweep goes on."""
        with suppress(OSError):
            print_note(f"{run.name}  {text}")


def describe_report(report: Report) -> str:
    """Returns a report of a run in a few words: a step, an evaluation, a notice; "" for all others."""
    if report.get("kind") == "evaluation":
        measure = "accuracy" if report.get("accuracy") is not None else "reward"
        setting = report.get("setting")
        step = setting.get("step", 0) if isinstance(setting, Mapping) else 0
        return f"held-out {measure} {_format(report.get(measure))} at step {step}"
    if report.get("kind") == "event" and report.get("event") == "sweep":
        return str(report.get("text", ""))
    if report.get("kind") != "step":
        return ""
    found = report.get("metrics")
    metrics = found if isinstance(found, Mapping) else {}
    # Supervised fine-tuning has no reward.
    label, name = ("reward", "reward/mean") if "reward/mean" in metrics else ("loss", "loss")
    eta = report.get("eta")
    seconds = float(eta) if isinstance(eta, int | float) else math.nan
    return (
        f"step {report.get('step')}/{report.get('num_steps')}  {label} {_format(metrics.get(name))}"
        f"  eta {format_duration(seconds)}"
    )


def _format(value: object) -> str:
    """Returns a number of a report as text; "nan" for what JSON has as null."""
    return format_compact(float(value)) if isinstance(value, int | float) else "nan"


def describe_result(result: RunResult | None, is_saved: bool) -> str:
    """Returns how a run ended in a few words; None = it was interrupted. `is_saved` = it has a checkpoint."""
    if result is None:
        return "interrupted, saved" if is_saved else "interrupted before there was anything to save"
    if result.state == "done":
        return f"done after step {result.step}"
    if result.state == "stopped":
        return f"stopped after step {result.step} by {result.why}"
    return f"failed: {result.why}"
