"""Rows from files and from the hub: every format gives the same rows, and errors name the file and line."""

from __future__ import annotations

import csv
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cohort.errors import TaskError
from cohort.tasks.code.task import Code
from cohort.tasks.places import Place, make_data_path_absolute
from cohort.tasks.rows import Rows
from cohort.tasks.source import read_rows
from cohort.types import Row

RAW = [
    {"question": "2 + 2?", "answer": "4"},
    {"question": 'Who, said "no"?\nSay it.', "answer": "Zoë 🦆"},
    {"question": "3 + 3?", "answer": "6"},
]
PLACES = {
    "train": Place(file="sums_train.jsonl", hub="someone/sums:main", split="train"),
    "test": Place(file="sums_test.jsonl", hub="someone/sums:main", split="validation"),
}
COLUMNS = ("question", "answer")
DATA = os.environ.get("COHORT_DATA", "")


def make(raw: dict[str, Any]) -> Row:
    for name in COLUMNS:
        if not isinstance(raw.get(name), str):
            raise ValueError(f"{name} is not text")
    return {"question": raw["question"], "answer": raw["answer"]}


def read(data: str | Path = "", split: str = "test", columns: tuple[str, ...] = (), **changes: Any) -> list[Row]:
    settings = {"places": PLACES, "make": make, "key": "question", "task_columns": COLUMNS} | changes
    return list(read_rows("sums", split, data=str(data), columns=columns, **settings))


def pairs(rows: list[Row]) -> list[tuple[str, str]]:
    return [(row["question"], row["answer"]) for row in rows]


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def table(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return path


def refused(message: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(TaskError) as caught:
        read(*args, **kwargs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COHORT_DATA", raising=False)


# -- formats ---------------------------------------------------------------------------------------------------------


def test_json_lines_json_and_csv_give_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(RAW, indent=1))
    files = [lines(tmp_path / "rows.jsonl", RAW), tmp_path / "rows.json", table(tmp_path / "rows.CSV", RAW)]
    want = [(row["question"], row["answer"]) for row in RAW]
    found = [read(file) for file in files]
    assert pairs(found[0]) == want
    assert found[0] == found[1] == found[2]
    assert len({row["id"] for row in found[0]}) == 3


def test_a_byte_order_mark_windows_line_ends_and_blank_lines_are_read(tmp_path: Path) -> None:
    one, two = '{"question": "a?", "answer": "1"}', '{"question": "b?", "answer": "2"}'
    (tmp_path / "w.jsonl").write_bytes(f"\ufeff{one}\r\n\r\n  \r\n{two}".encode())
    assert pairs(read(tmp_path / "w.jsonl")) == [("a?", "1"), ("b?", "2")]
    (tmp_path / "w.jsonl").write_bytes(f"\ufeff{one}\r\n\r\n  \r\n{two}!".encode())
    refused("line 4 cannot be read as JSON", tmp_path / "w.jsonl")  # blank lines count
    (tmp_path / "w.json").write_bytes(f"\ufeff[{one},\r\n{two}]\r\n".encode())
    assert pairs(read(tmp_path / "w.json")) == [("a?", "1"), ("b?", "2")]
    (tmp_path / "w.csv").write_bytes('\ufeff\r\nquestion,answer\r\n\r\n"a\r\nb?",1\r\nc?,\r\n'.encode())
    assert pairs(read(tmp_path / "w.csv")) == [("a\r\nb?", "1"), ("c?", "")]


def test_a_cell_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    long = "x" * 300_000
    assert pairs(read(table(tmp_path / "long.csv", [{"question": long, "answer": "1"}]))) == [(long, "1")]


A = '{"question": "a", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", A + "no\n", "a.jsonl, line 2 cannot be read as JSON: Expecting value (column 1)"),
        ("a.jsonl", '\n\n{"question": "a"', "a.jsonl, line 3 cannot be read as JSON"),
        (
            "a.jsonl",
            f"[{A.strip()}]",
            "a.jsonl, line 1 is [{'question': 'a', 'answer': '1'}]; correct it: a row must be a JSON object",
        ),
        ("a.jsonl", "null\n", "a.jsonl, line 1 is None; correct it: a row must be a JSON object"),
        ("a.jsonl", '{"question": "a", "answer": NaN}', "line 1 cannot be read as JSON: NaN is not a number"),
        ("a.jsonl", '{"question": "a", "answer": [-Infinity]}', "-Infinity is not a number"),
        ("a.jsonl", '{"question": "a", "answer": 1e999}', "the number 1e999 is too large"),
        ("a.jsonl", '{"question": "\\ud83e", "answer": "1"}', "half a character"),
        ("a.jsonl", "[" * 100_000, "line 1 cannot be read as JSON"),
        ("a.jsonl", '{"question": ' + "1" * 5000 + "}", "line 1 cannot be read as JSON"),
        ("a.jsonl", A + '{"question": "b", "answer": 1}', "line 2: answer is not text"),
        (
            "a.jsonl",
            '{"question": "a", "Answer": "1"}',
            "a.jsonl, line 1 has no column \"answer\" (answer is not text); it has ['question', 'Answer']. If one of "
            "these is meant, set --task.columns answer=COLUMN; if not, add the column",
        ),
        ("a.jsonl", "", "a.jsonl has no rows"),
        ("a.jsonl", "\n \n", "a.jsonl has no rows"),
        ("a.json", "", "a.json has no rows"),
        ("a.json", "[]", "a.json has no rows"),
        ("a.json", '{"rows": []}', "a.json is JSON, but not an array"),
        (
            "a.json",
            '{"question": "a"}\n{"question": "b"}\n',
            "a.json, line 2 cannot be read as JSON: Extra data (column 1)",
        ),
        ("a.json", f"[{A}, 3]", "a.json, row 2 is 3; correct it: a row must be a JSON object"),
        ("a.json", "[NaN]", "a.json cannot be read as JSON: NaN"),
        ("a.csv", "", "a.csv has no rows"),
        ("a.csv", "question,answer\n", "a.csv has no rows"),
        ("a.csv", "question,answer\na,1\nb\n", "a.csv, line 3 has 1 cells, but the header line names 2 columns"),
        ("a.csv", "question,answer\na,1,2\n", "a.csv, line 2 has 3 cells"),
        ("a.csv", "question,question\na,1\n", "its header line names two columns alike"),
        ("a.csv", 'question,answer\na,1\n"b,2\n', "a.csv, line 3 is not CSV"),
        ("a.csv", "question;answer\na;1\n", "it has ['question;answer']. If one of these is meant, set --task.columns"),
        (
            "a.jsonl",
            A + '{"question": "a", "question": "b"}',
            "line 2 cannot be read as JSON: the key 'question' occurs",
        ),
        ("a.jsonl", '{"question": {"x": 1, "x": 1}}', "the key 'x' occurs twice in one object"),
        ("a.json", '[{"question": "a", "question": "a"}]', "a.json cannot be read as JSON: the key 'question' occurs"),
        ("a.txt", "x", "a.txt: its name must end in one of .jsonl, .json, .csv, .parquet"),
    ],
)
def test_what_is_wrong_with_a_file_is_named_with_its_place(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    refused(message, tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_file_that_is_not_utf8_is_refused_by_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"question": "a", "answer": "1"}\n{"question": "caf\xe9"}\n')
    refused(f"{name}, line 2 is not UTF-8 text", tmp_path / name)


def test_a_missing_file_a_folder_and_an_unset_variable_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    refused("nowhere.jsonl: there is no such file", tmp_path / "nowhere.jsonl")
    refused("there is no such file", "data/nowhere.jsonl")  # the name of a file, not of a data set
    refused("it is a folder", tmp_path)
    refused("the environment variable COHORT_NOWHERE is not set", "$COHORT_NOWHERE/a.jsonl")
    refused("there is no such file", "x" * 5000 + ".jsonl")
    lines(tmp_path / "a.jsonl", RAW)
    monkeypatch.setenv("COHORT_SOMEWHERE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("$COHORT_SOMEWHERE/a.jsonl") == read("~/a.jsonl") == read(tmp_path / "a.jsonl")


def test_parquet_gives_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([*RAW] * 700 + [{"question": None}]), file)
    rows = read_rows(
        "sums", "test", data=str(file), columns=(), places={}, make=make, key="question", task_columns=COLUMNS
    )
    assert [next(rows) for _ in RAW] == read(lines(tmp_path / "rows.jsonl", RAW))
    with pytest.raises(TaskError, match=r"rows.parquet, row 2101: question is not text"):  # in the third batch
        next(rows)
    file.write_bytes(b"PAR1 this is none")
    refused("cannot read ", file)
    refused("rows.parquet: ", file)


def test_parquet_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    refused(
        "rows.parquet needs the package pyarrow, which is not installed; run pip install 'cohort[data]'",
        tmp_path / "rows.parquet",
    )


# -- columns ---------------------------------------------------------------------------------------------------------


def test_columns_get_our_names(tmp_path: Path) -> None:
    theirs = [{"Q": "2 + 2?", "answer": "wrong", "A": "4", "n": 1}]
    file = lines(tmp_path / "a.jsonl", theirs)
    assert pairs(read(file, columns=("question=Q", "answer=A"))) == [("2 + 2?", "4")]
    seen: list[dict[str, Any]] = []
    read(file, columns=("question=Q", "answer=A"), make=lambda raw: seen.append(raw) or make(raw))
    assert seen == [{"n": 1, "question": "2 + 2?", "answer": "4"}]


def test_columns_can_be_exchanged_and_used_twice(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [{"question": "4", "answer": "2 + 2?"}])
    assert pairs(read(file, columns=("question=answer", "answer=question"))) == [("2 + 2?", "4")]
    assert pairs(read(file, columns=("question=answer", "answer=answer"))) == [("2 + 2?", "2 + 2?")]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            ("qestion=Q",),
            'columns has "qestion=", but sums reads no such column; correct --task.columns. Did you mean "question"?',
        ),
        (("level=Q",), "sums reads no such column; correct --task.columns. Valid: answer, question."),
        (("question",), 'columns has the entry "question"; write the column that sums reads'),
        (("=Q",), 'columns has the entry "=Q"'),
        (("question=",), 'columns has the entry "question="'),
        (("",), 'columns has the entry ""'),
        (("question=Q", "question=A"), 'columns has two entries for "question"'),
        (("question=QQ",), 'a.jsonl, line 1 has no column "QQ"; correct the name in --task.columns. Did you mean "Q"?'),
        ("question", 'columns has the entry "question"'),  # text instead of a list of texts
    ],
)
def test_a_wrong_mapping_is_refused(tmp_path: Path, columns: Any, message: str) -> None:
    refused(message, lines(tmp_path / "a.jsonl", [{"Q": "a", "A": "b"}]), columns=columns)


def test_a_mapped_column_has_to_be_in_every_row(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [{"Q": "a", "answer": "b"}, {"question": "c", "answer": "d"}])
    refused('a.jsonl, line 2 has no column "Q"', file, columns=("question=Q",))


def test_a_column_that_a_task_takes_for_granted_is_named(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [{"Q": "a"}])
    refused("line 1 has no column \"question\"; it has ['Q'].", file, make=lambda raw: {"question": raw["question"]})
    bug: dict[str, str] = {}
    with pytest.raises(KeyError):
        read(file, make=lambda raw: {"question": bug["Q"]})


# -- which problem is which -----------------------------------------------------------------------------------------


def test_ids_follow_the_problem_and_not_its_place(tmp_path: Path) -> None:
    there = read(lines(tmp_path / "a.jsonl", RAW))
    back = read(lines(tmp_path / "b.jsonl", RAW[::-1]))
    assert pairs(back) == pairs(there)[::-1]
    assert {row["question"]: row["id"] for row in there} == {row["question"]: row["id"] for row in back}
    changed = read(lines(tmp_path / "c.jsonl", [{**row, "answer": "?"} for row in RAW]))
    assert [row["id"] for row in changed] == [row["id"] for row in there]


def test_an_id_of_the_row_is_kept(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [RAW[0] | {"n": 0}, RAW[1] | {"n": None}])
    rows = read(file, make=lambda raw: make(raw) | {"id": raw["n"]})
    assert rows[0]["id"] == 0
    assert rows[1]["id"] == read(file)[1]["id"]


def test_repetitions_are_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [RAW[0], RAW[2], RAW[0], {"question": "  2 +\t2? ", "answer": "4"}, RAW[1], RAW[2]]
    file = lines(tmp_path / "a.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        assert pairs(read(file)) == pairs([RAW[0], RAW[2], RAW[1]])
    assert [r.getMessage() for r in caplog.records] == [
        f"sums: {file}: repeated rows left out: 3 (first: line 3 repeats 1)"
    ]
    assert caplog.records[0].name == "cohort.tasks.source"


def test_rows_that_differ_in_spelling_or_id_are_the_same(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [{"question": q, "answer": "4"} for q in ("What IS it?", "what is\nit? ")])
    ids = iter("ab")
    assert len(read(file, make=lambda raw: make(raw) | {"id": next(ids)})) == 1


def test_one_problem_with_two_answers_is_refused(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [*RAW, {"question": "2 + 2?", "answer": "5" * 80}])
    both = f"answer is '4' and '{'5' * 56}...; remove the wrong row"
    refused(f"sums: {file}, line 1 and line 4 are the same problem ('2 + 2?'), but their {both}", file)
    table(tmp_path / "a.csv", [RAW[0], {"question": "2 + 2?", "answer": "5"}])
    refused("a.csv, line 2 and line 3 are the same problem", tmp_path / "a.csv")


def test_two_problems_with_one_id_are_refused(tmp_path: Path) -> None:
    def named(raw: dict[str, Any]) -> Row:
        return {"id": raw["answer"], "question": raw["question"]}

    file = table(tmp_path / "a.csv", [RAW[0], RAW[1], {"question": "1 + 3?", "answer": "4"}])
    refused(f"sums: {file}, line 2 and line 5 have the same id '4'; give each its own id", file, make=named)
    twice = [{"question": f"{n}?", "answer": [4]} for n in range(2)]  # a list is no valid id, which `load_rows` reports
    refused("line 1 and line 2 have the same id [4]", lines(tmp_path / "a.jsonl", twice), make=named)


def test_the_path_of_a_file_that_exists_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines(tmp_path / "a_train.jsonl", RAW)
    monkeypatch.chdir(tmp_path)
    assert make_data_path_absolute("a_{split}.jsonl") == str(tmp_path / "a_{split}.jsonl")
    for name in ("owner/name", "$FOLDER/a.jsonl", "~/a.jsonl", "nowhere.jsonl", str(tmp_path / "a_train.jsonl")):
        assert make_data_path_absolute(name) == name


def test_train_has_no_problem_of_test(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = lines(tmp_path / "a_train.jsonl", [RAW[0], {"question": "3 +  3?", "answer": "7"}, RAW[1], RAW[0], RAW[2]])
    lines(tmp_path / "a_test.jsonl", [RAW[2]])
    with caplog.at_level(logging.WARNING):
        assert pairs(read(tmp_path / "a_{split}.jsonl", "train")) == pairs([RAW[0], RAW[1]])
    assert [record.getMessage() for record in caplog.records] == [
        f"sums: {train}: repeated rows left out: 1 (first: line 4 repeats 1)",
        f"sums: {train}: rows of test left out of train: 2 (first: line 2)",
    ]
    caplog.clear()
    assert pairs(read(tmp_path / "a_{split}.jsonl", "test")) == pairs([RAW[2]])
    assert not caplog.records


def test_train_that_is_all_of_test_is_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        lines(tmp_path / f"a_{split}.jsonl", RAW)
    refused("a_train.jsonl has no rows except rows that are also in test", tmp_path / "a_{split}.jsonl", "train")


def test_train_can_be_read_without_test(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines(tmp_path / "a_train.jsonl", RAW)
    with caplog.at_level(logging.DEBUG, logger="cohort.tasks.source"):
        assert len(read(tmp_path / "a_{split}.jsonl", "train")) == 3
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert "train is not compared with test: cannot read" in caplog.text
    (tmp_path / "a_test.jsonl").write_text("broken")
    refused("a_test.jsonl, line 1 cannot be read as JSON", tmp_path / "a_{split}.jsonl", "train")


def test_one_file_serves_testing_only(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", RAW)
    refused(
        f'data is "{file}", one path, which is for testing only. To train, have one file',
        file,
        "train",
    )
    refused('has no split "dev" in its data; use one of train, test', file, "dev")


# -- default places and the hub --------------------------------------------------------------------------------------


class Loaded:
    """Stands in for what the `datasets` library returns for a split."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]:
        for at in range(0, len(self.rows), batch_size):
            batch = self.rows[at : at + batch_size]
            yield {name: [row[name] for row in batch] for name in batch[0]}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None, str], list[dict[str, Any]]]:
    """A dict that stands in for the hub: (name, config, split) -> rows."""
    held: dict[tuple[str, str | None, str], list[dict[str, Any]]] = {}
    library, errors = ModuleType("datasets"), ModuleType("datasets.exceptions")

    class DatasetsError(Exception): ...

    def load_dataset(name: str, config: str | None, *, split: str) -> Loaded:
        if (name, config, split) not in held:
            raise DatasetsError(f"no {split}\n in {name}")
        return Loaded(held[name, config, split])

    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    errors.DatasetsError = DatasetsError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setitem(sys.modules, "datasets.exceptions", errors)
    return held


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)


def test_the_folder_of_data_comes_before_the_hub(tmp_path: Path, monkeypatch: Any, hub: dict) -> None:
    hub["someone/sums", "main", "validation"] = [RAW[2]]
    monkeypatch.setenv("COHORT_DATA", str(tmp_path))
    assert pairs(read()) == pairs([RAW[2]])
    lines(tmp_path / "sums_test.jsonl", [RAW[0]])
    assert pairs(read()) == pairs([RAW[0]])


@pytest.mark.usefixtures("no_hub")
def test_without_file_and_library_both_remedies_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    remedies = "sums:main from the Hugging Face hub needs the package datasets; run pip install 'cohort[data]', or "
    refused(remedies + "set COHORT_DATA to a folder with sums_test.jsonl")
    monkeypatch.setenv("COHORT_DATA", str(tmp_path))
    refused(remedies + f"put sums_train.jsonl into {tmp_path}, the folder that COHORT_DATA names", split="train")
    refused(
        "a/b:c from the Hugging Face hub needs the package datasets; run pip install 'cohort[data]', or give the path",
        "a/b:c",
    )


def test_a_split_without_a_place_and_a_place_without_a_hub(tmp_path: Path, monkeypatch: Any) -> None:
    refused("sums comes without train rows", split="train", places={"test": PLACES["test"]})
    alone = {"test": Place(file="a.jsonl", hub="", split="")}
    refused(
        "sums needs the file a.jsonl with its test rows; set the environment variable COHORT_DATA (now: not set)",
        places=alone,
    )
    monkeypatch.setenv("COHORT_DATA", str(tmp_path))
    lines(tmp_path / "a.jsonl", RAW)
    assert len(read(places=alone)) == 3


def test_rows_of_a_hub_data_set(hub: dict, caplog: pytest.LogCaptureFixture) -> None:
    many = [{"Q": f"{n}?", "answer": str(n)} for n in range(2500)]
    hub["a/b.c", None, "train"] = many
    hub["a/b.c", None, "test"] = many[7:9]
    rows = read("a/b.c", "train", columns=("question=Q",))
    assert pairs(rows) == [(f"{n}?", str(n)) for n in range(2500) if n not in (7, 8)]
    assert "a/b.c, split train: rows of test left out of train: 2 (first: row 8)" in caplog.text
    many[1200] = {"Q": "x", "answer": None}
    refused("a/b.c, split train, row 1201: answer is not text", "a/b.c", "train", columns=("question=Q",))


def test_a_hub_data_set_that_does_not_exist(hub: dict, caplog: pytest.LogCaptureFixture) -> None:
    refused(
        "no test in a/b; check the name of the data set, its split and the network, or give the path",
        "a/b:c",
    )
    refused("its split and the network, or set COHORT_DATA to a folder with sums_test")
    hub["a/b", "c", "train"] = RAW
    with caplog.at_level(logging.DEBUG, logger="cohort.tasks.source"):
        assert len(read("a/b:c", "train")) == 3
    assert "train is not compared with test: cannot read a/b:c, split test" in caplog.text


def test_a_file_for_training_asks_the_hub_for_nothing(tmp_path: Path, monkeypatch: Any, hub: dict, caplog: Any) -> None:
    hub["someone/sums", "main", "validation"] = RAW
    monkeypatch.setenv("COHORT_DATA", str(tmp_path))
    lines(tmp_path / "sums_train.jsonl", RAW)
    with caplog.at_level(logging.DEBUG, logger="cohort.tasks.source"):
        assert len(read(split="train")) == 3
    assert "the test rows are on the hub (someone/sums:main, split validation) and were not read" in caplog.text


def test_a_file_is_a_file_even_if_it_could_be_a_data_set(tmp_path: Path, monkeypatch: Any, hub: dict) -> None:
    hub["owner/name", None, "test"] = RAW
    monkeypatch.chdir(tmp_path)
    assert len(read("owner/name")) == 3
    (tmp_path / "owner/name").mkdir(parents=True)
    refused("owner/name: it is a folder", "owner/name")


@pytest.mark.skipif(not DATA, reason="needs the data sets in $COHORT_DATA")
def test_gsm8k_is_read_whole() -> None:
    """No question is in it twice, and none is in both files."""
    for split, size in (("train", 7473), ("test", 1319)):
        rows = read(f"{DATA}/gsm8k_{{split}}.jsonl", split)
        assert len(rows) == size == len({row["id"] for row in rows})


@pytest.mark.parametrize("make_task", [lambda data: Rows(data=data), lambda data: Code(data=data)])
def test_a_training_file_without_a_test_file_has_no_test_rows(
    make_task: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines(tmp_path / "mine_train.jsonl", [{"prompt": "Write f(x).", "tests": ["assert f(1) == 1"]}])
    task = make_task(str(tmp_path / "mine_{split}.jsonl"))
    with caplog.at_level(logging.WARNING):
        assert [row["prompt"] for row in task.rows("train")] == ["Write f(x)."]
        assert list(task.rows("test")) == []
    assert [r.getMessage() for r in caplog.records] == [
        f"{task.name}: there is no file {tmp_path / 'mine_test.jsonl'}, so there are no test rows"
    ]
    (tmp_path / "mine_train.jsonl").unlink()
    with pytest.raises(TaskError, match=r"cannot read .*mine_test"):
        list(task.rows("test"))
