"""Wrong command lines, and the exact message that each gets: one line, no traceback, with a remedy.

`tables/wrong_lines.txt` has a command and its message per paragraph. Read a new message as a tired stranger would.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cohort.cli.main import main
from cohort.recipes import RECIPES
from cohort.tasks.base import BUILT_IN, TASKS

TABLE = Path(__file__).parent / "tables" / "wrong_lines.txt"
# Words by which a message says what to do.
REMEDY = re.compile(
    r"Did you mean|Flags have two dashes: --|It is a section of settings: --|: cohort train |cohort export RUN OUT"
    r"|\b(Correct|Write|write|Add|Remove|remove|Set|Raise|Lower|Choose|Use|Name|name|Give|give|Train|put)\b"
)


def read_table() -> dict[str, str]:
    """Returns the message of each command line."""
    paragraphs = TABLE.read_text(encoding="utf-8").strip().split("\n\n")
    return dict(paragraph.removeprefix("$ cohort ").split("\n") for paragraph in paragraphs)  # type: ignore[misc]


@pytest.mark.parametrize(("line", "message"), read_table().items(), ids=read_table())
def test_a_wrong_line_gets_exactly_this_message(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))
    # Other test modules of this process register tasks.
    for name in TASKS.keys() - BUILT_IN.keys():
        monkeypatch.delitem(TASKS, name)
    built_in = sorted(name for name, recipe in RECIPES.items() if recipe.__module__.startswith("cohort."))
    expected = message.replace("{recipes}", ", ".join(built_in)).replace("{tasks}", ", ".join(sorted(BUILT_IN)))
    assert main(shlex.split(line)) == 2
    out, err = capfd.readouterr()
    assert out == "" and err == f"cohort: {expected}\n"
    assert REMEDY.search(message), "the message does not say what to do"
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_large_and_names_every_command() -> None:
    lines = read_table()
    assert len(lines) >= 60
    commands = {line.split()[0] for line in lines}
    assert commands >= {"train", "resume", "eval", "compare", "models", "pull", "export", "data", "check", "explain"}
    assert commands >= {"replay", "bench", "plot", "sweep"}
