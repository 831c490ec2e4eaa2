"""Rows from a JSON Lines file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from cohort.errors import TaskError
from cohort.types import Row


def read_jsonl(path: str | Path) -> Iterator[Row]:
    """The objects of a file, one a line, blank lines skipped. `~` and `$NAME` in the path are expanded."""
    file = Path(os.path.expandvars(os.path.expanduser(path)))
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse(file, number, line)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise TaskError(f"cannot read {file}: {why}; give the path of a JSON Lines file") from error


def _parse(file: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{file}, line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise TaskError(f"{file}, line {number} is a JSON {type(row).__name__}, not an object")
    return row
