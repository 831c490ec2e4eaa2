"""`cohort data TASK --out FILE [--split train] [--n N] [--task.x v]`: writes a task's prompts as JSONL."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from cohort.cli.tasks import read_task
from cohort.errors import ConfigError
from cohort.tasks.base import load_rows


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which rows to write, and where."""

    out: str = ""
    """The file to write; - = standard output."""
    split: str = "train"
    """train, test, or another split the task has."""
    n: int = 0
    """How many rows; 0 = all of them."""


def run(args: list[str]) -> None:
    """Runs `cohort data` with `args`, the words after it: writes the prompts of a task to a file or to standard output.

    A file appears complete or not at all, and replaces an older one. Raises ConfigError for wrong flags.
    """
    task, options = read_task("data", "Write a task's prompts as JSONL.", Options(), args)
    if not options.out:
        raise ConfigError("--out is missing. Add --out FILE with the file to write, or --out - for standard output.")
    if options.n < 0:
        raise ConfigError(f"--n is {options.n}; it must be at least 0 (0 = all rows). Correct or remove it.")
    # Mistakes in --out are found before the rows are loaded.
    path = Path(options.out)
    if options.out != "-" and not path.parent.is_dir():
        raise ConfigError(
            f'there is no folder "{path.parent}" for the file in --out; make the folder, or name another file.'
        )
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; name a file to write, for example {path}/rows.jsonl.")
    rows = load_rows(task, options.split)
    if options.n > len(rows):
        raise ConfigError(
            f"--n is {options.n}, but {task.name} has {len(rows)} {options.split} rows; lower --n, or remove it "
            "for all rows."
        )
    lines = _render_rows(task, rows[: options.n or None])
    if options.out == "-":
        _write_lines(lines, sys.stdout)
        return
    # Written aside first, so that an interrupted write leaves no half file.
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("w", encoding="utf-8") as file:
            count = _write_lines(lines, file)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    print(f"wrote {count} {task.name} prompts ({options.split}) to {path}")


def _render_rows(task: Any, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yields one JSON object per row as a line of text, with its id, its prompt as messages and the row itself."""
    for row in rows:
        yield json.dumps({"id": row["id"], "messages": task.prompt(row), "row": row}, ensure_ascii=False)


def _write_lines(lines: Iterator[str], file: TextIO) -> int:
    """Writes lines to an open file, a line break after each, and returns how many there were."""
    count = 0
    for line in lines:
        file.write(line + "\n")
        count += 1
    return count
