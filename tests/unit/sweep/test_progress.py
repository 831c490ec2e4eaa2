"""Progress of a sweep: what its lines say, how often they come, and that no reader is needed."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from rich.live import Live

from cohort.cli.sweep_progress import LiveProgress
from cohort.logs.console import make_console
from cohort.sweep.directory import RunResult
from cohort.sweep.plan import PlannedRun
from cohort.sweep.process import read_last_line
from cohort.sweep.progress import LineProgress, describe_report

RUN = PlannedRun(number=1, combination=0, values={"optim.lr": ["1e-4"]}, seed=0, name="001-optim.lr=1e-4")
STEP = {"kind": "step", "step": 3, "num_steps": 30, "eta": 61.5, "metrics": {"reward/mean": 0.4567, "loss": 1.0}}


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (STEP, "step 3/30  reward 0.457  eta 1:01"),
        ({**STEP, "metrics": {"loss": 0.25}, "eta": None}, "step 3/30  loss 0.250  eta -:--"),
        ({**STEP, "metrics": {"reward/mean": None}}, "step 3/30  reward nan  eta 1:01"),
        ({"kind": "evaluation", "accuracy": 0.5, "setting": {"step": 7}}, "held-out accuracy 0.500 at step 7"),
        ({"kind": "event", "event": "sweep", "text": "a notice"}, "a notice"),
        ({"kind": "event", "event": "checkpoint", "text": "saved"}, ""),
        ({"kind": "step"}, "step None/None  loss nan  eta -:--"),
        ({}, ""),
    ],
)
def test_a_report_is_described_in_a_few_words(report: dict[str, object], text: str) -> None:
    assert describe_report(report) == text


def test_lines_about_steps_come_at_most_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("cohort.sweep.progress.time.monotonic", lambda: clock[0])
    progress = LineProgress(4, num_done=1)
    progress.begin_run(RUN)
    for seconds in (1.0, 9.9, 10.0, 11.0, 19.0, 20.0):
        clock[0] = seconds
        progress.show_report(RUN, {**STEP, "step": int(seconds)})
    progress.end_run(RUN, RunResult(state="failed", why="ValueError: \x1b[2J"), False)
    progress.end_run(RUN, None, True)
    progress.end_run(RUN, None, False)
    assert [line.removeprefix(RUN.name).strip() for line in capsys.readouterr().err.splitlines()] == [
        "starts",
        "step 10/30  reward 0.457  eta 1:01",
        "step 20/30  reward 0.457  eta 1:01",
        "failed: ValueError: \\x1b[2J (2 of 4 runs have ended)",
        "interrupted, saved (2 of 4 runs have ended)",
        "interrupted before there was anything to save (2 of 4 runs have ended)",
    ]


def test_a_reader_that_has_left_does_not_end_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        LineProgress(1).begin_run(RUN)
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # closing the stream writes what is left in it


def test_a_terminal_shows_one_line_per_run_and_escapes_it() -> None:
    output = io.StringIO()
    console = make_console(output)
    with Live(console=console, auto_refresh=False) as live:
        progress = LiveProgress(live, 2, 0)
        progress.begin_run(RUN)
        progress.show_report(RUN, STEP)
        progress.end_run(RUN, RunResult(state="failed", why="\x1b[2J"), True)
    text = output.getvalue()
    assert "failed: \\x1b[2J" in text and "\x1b[2J" not in text and "1 of 2 runs have ended" in text


def test_the_last_line_of_a_log_is_that_of_the_newest_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old error\n")
    begin = log.stat().st_size
    assert read_last_line(log, begin) == "" and read_last_line(log) == "old error"
    log.write_text("old error\nTraceback\n  File\nValueError: new\n\n")
    assert read_last_line(log, begin) == "ValueError: new"
