"""Rows through the `datasets` library itself (tests/unit/tasks/test_source.py replaces it). A folder stands for the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from cohort.errors import TaskError
from cohort.tasks.source import Place, read_rows
from cohort.types import Row

pytestmark = pytest.mark.peers

RAW = [{"ask": "2 + 2?", "answer": "4"}, {"ask": 'Who, said "no"?\nSay it.', "answer": "Zoë 🦆"}]


def make(raw: dict[str, Any]) -> Row:
    return {"question": raw["question"], "answer": raw["answer"]}


def read(folder: Path, split: str, columns: tuple[str, ...] = ("question=ask",)) -> list[Row]:
    places = {"test": Place(file="", hub=str(folder), split=split)}
    own = ("question", "answer")
    return list(read_rows("sums", "test", data="", columns=columns, places=places, make=make, key="question", task_columns=own))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("COHORT_DATA", raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = tmp_path / "set"
    made.mkdir()
    text = "".join(json.dumps(row) + "\n" for row in RAW)
    (made / "validation.jsonl").write_text(text, encoding="utf-8")
    return made


def test_the_library_gives_the_rows_of_the_file(folder: Path) -> None:
    assert [(row["question"], row["answer"]) for row in read(folder, "validation")] == [
        (r["ask"], r["answer"]) for r in RAW
    ]


def test_a_split_or_a_column_it_does_not_have_is_refused(folder: Path) -> None:
    with pytest.raises(TaskError, match='Unknown split "test"'):
        read(folder, "test")
    with pytest.raises(TaskError, match="query"):
        read(folder, "validation", ("question=query",))
