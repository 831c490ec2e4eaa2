"""What graders print is shown, but not without end."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cohort.logs.printing import show_grader_output
from cohort.scoring.pool import ScoringPool
from cohort.scoring.printed import PrintedLines
from cohort.tasks.base import make_plain_answer
from cohort.tasks.ref import TaskRef

TASK = """
import sys
import cohort

@cohort.task("talks")
class Talks:
    def rows(self, split): yield {}
    def prompt(self, row): return []
    def score(self, row, answer):
        print("saw", answer.text)
        print("on stderr \\x1b[31m", file=sys.stderr)
        return {"correct": 0.0}
"""


def test_the_first_lines_are_shown_and_the_others_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    printed = PrintedLines("t")
    printed.add("one\n\n  \ntwo\n", 4)
    for n in range(30):
        printed.add(f"line {n}\n", 1)
    printed.add("x" * 5000, 100_000)  # most of it was not sent
    shown = [r.getMessage() for r in caplog.records]
    assert shown[:3] == [f"the grader of t prints: {text}" for text in ("one", "two", "line 0")]
    assert sum("prints:" in line for line in shown) == 10
    told = [line.rpartition(": ")[2] for line in shown if "not shown" in line]
    assert told == ["1", "10", "100022"]  # ever more rarely


def test_commands_show_what_a_worker_sends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "talks.py").write_text(TASK)
    with show_grader_output(), ScoringPool(TaskRef(name="talks", path=str(tmp_path / "talks.py"))) as pool:
        pool.score([({"id": "a"}, make_plain_answer("hi"))])
    assert capsys.readouterr().err.splitlines() == [
        "the grader of talks prints: saw hi",
        "the grader of talks prints: on stderr \\x1b[31m",
    ]
