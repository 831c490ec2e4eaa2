"""Rows read by the real `datasets` library from a folder, which replaces the hub.

tests/unit/tasks/test_source.py replaces the library too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from cohort.errors import TaskError
from cohort.tasks.places import Place
from cohort.tasks.source import read_rows
from cohort.types import Row

pytestmark = pytest.mark.peers

RAW = [{"ask": "2 + 2?", "answer": "4"}, {"ask": 'Who, said "no"?\nSay it.', "answer": "Zoë 🦆"}]


def make_row(raw: dict[str, Any]) -> Row:
    """Returns the row of the task for a row of the data set, whose columns have been renamed."""
    return {"question": raw["question"], "answer": raw["answer"]}


def read(folder: Path, split: str, columns: tuple[str, ...] = ("question=ask",)) -> list[Row]:
    """Returns the rows of a split of the data set in `folder`. `columns` renames columns: TASK_COLUMN=DATA_COLUMN."""
    places = {"test": Place(file="", hub=str(folder), split=split)}
    task_columns = ("question", "answer")
    rows = read_rows(
        "sums",
        "test",
        data="",
        columns=columns,
        places=places,
        make=make_row,
        key="question",
        task_columns=task_columns,
    )
    return list(rows)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set with one split, "validation"."""
    monkeypatch.delenv("COHORT_DATA", raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data_set = tmp_path / "set"
    data_set.mkdir()
    text = "".join(json.dumps(row) + "\n" for row in RAW)
    (data_set / "validation.jsonl").write_text(text, encoding="utf-8")
    return data_set


def test_the_library_gives_the_rows_of_the_file(folder: Path) -> None:
    assert [(row["question"], row["answer"]) for row in read(folder, "validation")] == [
        (r["ask"], r["answer"]) for r in RAW
    ]


def test_a_split_or_column_that_the_data_set_lacks_is_refused(folder: Path) -> None:
    with pytest.raises(TaskError, match='Unknown split "test"'):
        read(folder, "test")
    with pytest.raises(TaskError, match="query"):
        read(folder, "validation", ("question=query",))
