"""The page about judges: its first program runs as printed, and the task's grader asks a server as the page says."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cohort
from tests.helpers.fake_server import serving
from tests.helpers.judge_server import grades

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "judge.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"```python\n# (\w+)\.py[^\n]*\n(.*?)```", PAGE, re.DOTALL))


def test_the_first_program_runs_as_printed(tmp_path: Path) -> None:
    assert list(PROGRAMS) == ["try_judge", "essay"]
    (tmp_path / "try_judge.py").write_text(PROGRAMS["try_judge"], encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COHORT_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "try_judge.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    first, *rehearsal = done.stdout.splitlines()
    assert first == "[0.1, 0.2, 0.3, 0.4] It has 3 words."
    scores = dict(line.rsplit(maxsplit=1) for line in rehearsal)
    assert scores["plain"] == "0.40" and scores["command"] == "1.00" and scores["empty"] == "0.00"


def test_the_task_asks_the_judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path))
    # Without the decorator: the class is what the page explains.
    space: dict[str, Any] = {}
    text = PROGRAMS["essay"].replace('@cohort.task("essay")\n', "")
    exec(compile(text, "essay.py", "exec"), space)
    task = space["Essay"]()
    row = next(iter(task.rows("train")))
    with serving() as server:
        server.behaviours = [grades()]
        space["judge"] = dataclasses.replace(space["judge"], url=server.url)
        verdict = asyncio.run(task.score(row, SimpleNamespace(text="***")))
    assert verdict == cohort.Verdict(parts={"score": 0.3}, reason="I counted.")


def test_the_table_has_every_setting_with_its_default() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|([^|]*)\|", PAGE, re.MULTILINE)
    shown = {name: cell for names, cell in rows for name in re.findall(r"`(\w+)`", names)}
    fields = {field.name: field for field in dataclasses.fields(cohort.Judge)}
    assert shown.keys() == fields.keys()
    for names, cell in rows:
        if cell.strip():
            values = eval(f"[{cell.replace('`', '')}]")
            for name, value in zip(re.findall(r"`(\w+)`", names), values, strict=True):
                field = fields[name]
                default = field.default_factory() if callable(field.default_factory) else field.default
                assert default == value, name
