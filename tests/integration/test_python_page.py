"""The programs of docs/python.md run as they are printed, each in a new process and an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^#+ ([^\n]+)\n(?:(?!\n#).)*?```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))
# What each program prints last, as a pattern.
LAST_LINES = {
    "Cohort from Python": r" *cohort train tiny_countdown",
    "Read a run": r"2 0\.\d+ \(0\.\d+, 0\.\d+\)",
    "A loop of your own": r"0\.\d+",
    "Sample and score without a task": r"2 0\.\d+",
    "A loss of your own": r".*cohort .*",
}


def test_the_page_has_these_programs() -> None:
    assert set(PROGRAMS) == set(LAST_LINES)


# The two that take longest. The others build and train in the same ways.
SLOW = ("Cohort from Python", "A loss of your own")
CASES = [pytest.param(title, marks=pytest.mark.slow if title in SLOW else ()) for title in LAST_LINES]


@pytest.mark.parametrize("title", CASES)
def test_a_program_of_the_page_runs(title: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[title], encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(LAST_LINES[title], done.stdout.strip().splitlines()[-1]), done.stdout
