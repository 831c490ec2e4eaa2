"""JSON that others wrote: a value of the right type, or a ValueError that says what is wrong."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cohort.system import json_text
from cohort.system.json_text import make_record, parse_json, read_json_file, show_value

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("text", ["", "{", "1" * 5000, DEEP, b"\xff", b'{"a": \xff}', "[1,]"])
def test_what_is_not_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_only_files_of_a_sensible_size_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    with pytest.raises(FileNotFoundError):
        read_json_file(file)
    file.write_text('{"a": [1, "é"]}', encoding="utf-8")
    assert read_json_file(file) == {"a": [1, "é"]}
    monkeypatch.setattr(json_text, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match="16 bytes, more than 10"):
        read_json_file(file)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="not a file"):
            read_json_file(path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError):
        read_json_file(tmp_path / "loop")


def test_every_value_can_be_shown() -> None:
    nested: Any = []
    for _ in range(20_000):
        nested = [nested]
    assert show_value(nested) == "a list" and show_value(10**5000) == "a int"
    assert show_value("x" * 100) == "'" + "x" * 59 + "..." and show_value(None) == "None"


@dataclass(frozen=True)
class Inner:
    number: float
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outer:
    inner: Inner
    maybe: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    many: list[Inner] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    switch: bool = False


def test_records_are_made_of_json() -> None:
    value = {
        "inner": {"number": 1, "names": ["a"]},
        "maybe": 3,
        "counts": {"a": 1},
        "many": [{"number": 0.5}],
        "rest": {"x": [None]},
        "switch": True,
    }
    expected = Outer(Inner(1, ["a"]), 3, {"a": 1}, [Inner(0.5)], {"x": [None]}, True)
    assert make_record(Outer, value) == expected
    assert make_record(Outer, {"inner": {"number": 2.5}}) == Outer(Inner(2.5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": None}, "inner is None, not an object"),
        ({"inner": {}}, "inner: .*missing 1 required positional argument: 'number'"),
        ({"inner": {"number": "x"}}, "inner.number is 'x', not float"),
        ({"inner": {"number": True}}, "inner.number is True, not float"),
        ({"inner": {"number": 10**400}}, "inner.number is 1000"),
        ({"maybe": 1.5}, "maybe is 1.5, not"),
        ({"maybe": True}, "maybe is True, not"),
        ({"counts": {"a": None}}, "counts.a is None, not int"),
        ({"counts": {"a": 10**400}}, "counts.a is 1000"),
        ({"counts": []}, r"counts is \[\], not dict"),
        ({"many": {}}, "many is {}, not list"),
        ({"many": [{"number": []}]}, r"many\[0\].number is \[\], not float"),
        ({"switch": 1}, "switch is 1, not bool"),
        ({"extra": 1}, "unknown field 'extra'"),
    ],
)
def test_records_of_another_shape_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_record(Outer, {"inner": {"number": 1.0}, **change})
