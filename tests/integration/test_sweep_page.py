"""The commands of docs/sweep.md run as they are printed, one after another in the same folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.helpers.command_line import ROOT, cohort

PAGE = (ROOT / "docs" / "sweep.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    commands = re.findall(r"^```\n(cohort .*?)\n```$", PAGE, re.MULTILINE)
    assert len(commands) >= 5
    printed = []
    for command in commands:
        done = cohort(*shlex.split(command)[1:], at=tmp_path, timeout=600)
        assert done.returncode == 0, (command, done.stderr)
        printed.append(done.stdout)
    # The table at the beginning has the columns of the real one.
    header = next(line for line in PAGE.splitlines() if line.startswith("optim.lr "))
    assert header.split() == next(line for line in printed[0].splitlines() if "optim.lr" in line).split()
    files = re.findall(r"^  (\w+\.\w+|\w+/) ", PAGE, re.MULTILINE)
    assert len(files) >= 5 and all((tmp_path / "runs/first" / name).exists() for name in files)


@pytest.mark.slow
def test_the_ways_to_write_values_are_right(tmp_path: Path) -> None:
    """Each row of the table of values makes the runs that a reader expects."""
    rows = dict(re.findall(r"^\| `(--.*?)` \| (.*?) \|$", PAGE, re.MULTILINE))
    assert len(rows) == 6
    for line in rows:
        extra = "--learner.lora.rank 2" if "lora" in line else ""
        small = "--steps 2 --batch.prompts 2 --batch.samples 2 --eval.problems 20 --task.train-size 300"
        done = cohort(
            "sweep", "quickstart", *shlex.split(f"{line} {extra} {small}"), "--dry-run", at=tmp_path, timeout=300
        )
        num = 3 if line == "--seeds 3" else 2
        assert done.returncode == 0 and f"= {num} runs: about" in done.stdout, (line, done.stderr)
