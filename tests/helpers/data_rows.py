"""Small made-up files in place of the public data sets that tasks read, and rows that are made once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from cohort.tasks import base
from cohort.tasks.base import Task
from cohort.types import Row

if TYPE_CHECKING:
    import pytest

# By name of the file: rows in the format of the public file.
ROWS = {
    "gsm8k_train": [
        {
            "question": f"Ann has {n} pens and gets 3. How many?",
            "answer": f"She has {n}+3 pens after that.\n#### {n + 3}",
        }
        for n in range(200)
    ],
    "gsm8k_test": [
        {
            "question": f"Bob had {n} cups and broke 1. How many?",
            "answer": f"One cup less than {n} is left.\n#### {n - 1}",
        }
        for n in range(2, 702)
    ],
    "math_train_12k": [
        {"problem": f"What is ${n}^2$?", "answer": str(n * n), "level": 1 + n % 5, "subject": "Algebra"}
        for n in range(200)
    ],
    "math500": [{"problem": f"What is $\\frac{{{n}}}{{7}}$?", "answer": f"\\frac{{{n}}}{{7}}"} for n in range(1, 41)],
    "ifeval": [
        {
            "key": n,
            "prompt": f"Write a line about the number {n}, without commas.",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{}],
        }
        for n in range(40)
    ],
    "countdown_train": [{"nums": [n, 1, 2], "target": n + 3, "solution": f"{n}+1+2"} for n in range(10, 110)],
    "countdown_test": [{"nums": [n, 3, 4], "target": n + 7, "solution": f"{n}+3+4"} for n in range(10, 110)],
    "squad_passages": [
        {"id": f"p{n:04}", "title": f"Town {n}", "text": f"Town {n} was founded by Captain{n} in {1500 + n}."}
        for n in range(120)
    ],
    "squad_questions": [
        {
            "question": f"Who founded town {n}?",
            "answers": [f"Captain{n}", f"the Captain{n}"],
            "passage_id": f"p{n:04}",
            "title": f"Town {n}",
            "split": "train" if n < 80 else "test",
        }
        for n in range(120)
    ],
    "wiki2_passages": [
        {"id": f"w{n:04}", "title": f"Film {n}", "text": f"Film {n} was directed by Director{n}."} for n in range(120)
    ],
    "wiki2_questions": [
        {
            "question": f"Who directed film {n}?",
            "answers": [f"Director{n}"],
            "split": "train" if n < 80 else "test",
        }
        for n in range(120)
    ],
}


def write_rows(folder: Path) -> Path:
    """Writes all files to `folder` and returns it. COHORT_DATA can be set to it."""
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


_made: dict[tuple[type, str, str], list[Row]] = {}


def rows_made_once(task: Task, split: str, limit: int = 0, may_be_empty: bool = False) -> list[Row]:
    """Returns what `load_rows` returns, from a cache: many recipes share a task of ten thousand rows.

    COHORT_DATA must name the files written here, so that equal tasks have equal rows.
    """
    key = type(task), repr(task), split
    if key not in _made:
        _made[key] = base.load_rows(task, split, may_be_empty=may_be_empty)
    return _made[key][: limit or None]


def use_written_rows(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Writes all files to `folder`, makes tasks read them, and makes prompt streams use `rows_made_once`."""
    patch.setenv("COHORT_DATA", str(write_rows(folder)))
    patch.setattr("cohort.tasks.stream.load_rows", rows_made_once)
