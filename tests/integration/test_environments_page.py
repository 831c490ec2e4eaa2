"""The page about tools and environments: its programs and commands run as printed."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.helpers.command_line import cohort

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_programs_and_commands_of_the_page_run(tmp_path: Path) -> None:
    programs = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
    assert list(programs) == ["shop", "guess", "count"]
    for name, text in programs.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        done = cohort("eval", f"{name}.py:{name}", "--model=tiny", "--limit=3", "--max-tokens=24", at=tmp_path)
        assert done.returncode == 0, done.stderr
        # The bundled model knows none of these, but every conversation was played to its end.
        assert re.search(r"^accuracy +0\.\d+", done.stdout, re.MULTILINE), done.stdout
    commands = re.findall(r"^cohort (\w+ [^#\n]*)", PAGE, re.MULTILINE)
    games = [command for command in commands if "textarena" in command]
    commands = [command for command in commands if command not in games]
    assert [command.split()[0] for command in commands] == ["train", "train", "explain", "eval", "train"]
    *_, evaluate, train = commands
    assert cohort(*shlex.split(evaluate.replace("MODEL", "tiny")), "--limit=2", at=tmp_path).returncode == 0
    small = ["--steps=1", "--batch.prompts=2", "--batch.samples=2", "--eval.problems=2", "--threads=1"]
    done = cohort(*shlex.split(train.replace("MODEL", "tiny")), *small, at=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = cohort("explain", "shopping", "--step", 1, at=tmp_path)
    assert shown.returncode == 0 and "look_up" in shown.stdout, shown.stdout
    # The conversations in run.db. Whether the bundled model has written several turns here is its own matter.
    [query] = re.findall(r'^sqlite3 runs/RUN/run.db "(.*)"$', PAGE, re.MULTILINE)
    with closing(sqlite3.connect(tmp_path / "runs" / "shopping" / "run.db")) as db:
        assert len(db.execute(query).fetchall()) <= 8
    # Games need a package that the environment of developers does not have; its absence is told in one line.
    assert [command.split()[0] for command in games] == ["chat", "eval", "train"]
    for command in games if importlib.util.find_spec("textarena") is None else ():
        done = cohort(*shlex.split(command.replace("MODEL", "tiny")), at=tmp_path)
        assert done.returncode == 2 and "pip install 'cohort[textarena]'" in done.stderr, done.stderr
