"""Rows that lie somewhere: in a JSON Lines, JSON, CSV or Parquet file, or in a data set of the Hugging Face hub.

A task says how a raw row becomes one of its own and which field names the problem; the rest is the same for all of
them and is here. No problem is given twice, and no problem of test is in train: problems are compared by their text
with case and spacing put aside.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cohort.errors import TaskError, nearest
from cohort.types import Row

log = logging.getLogger(__name__)

FOLDER = "COHORT_DATA"
SPLITS = ("train", "test")
EXTRA = "pip install 'cohort[data]'"
MAX_CELL = 2**30  # characters in a cell of a CSV file; the csv module's own limit is shorter than a long solution
BATCH = 1000  # rows that Parquet files and hub data sets hand over at once
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

Raw = dict[str, Any]
Numbered = Iterator[tuple[int, Any]]
"""Raw rows with their numbers from 1: of the line in JSON Lines, of the row elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a task's rows lie unless the user names another place."""

    file: str  # name of a JSON Lines file in the folder $COHORT_DATA
    hub: str  # Hugging Face data set, "owner/name" or "owner/name:config"; "" if there is none
    split: str  # its split there


def read_rows(
    task: str,
    split: str,
    *,
    data: str,
    columns: Sequence[str],
    places: Mapping[str, Place],
    make: Callable[[Raw], Row],
    key: str,
    own: Sequence[str] = (),
) -> Iterator[Row]:
    """The rows of a split in the order of their source, each problem once, each with an id.

    `data` and `columns` are the task's knobs: "" for the default places, a path (perhaps with {split}, ~ or $NAME)
    or the name of a hub data set; and "ours=theirs" for columns that are named otherwise there. `make` turns a raw
    row into one of the task's, or raises ValueError (what is wrong with it). `key` is the field of a made row that
    says which problem it is; a row without an "id" of its own gets a hash of it. `own` are the columns that `make`
    reads: where they are given, a mapping to any other is refused.
    """
    reader = _Reader(task=task, make=make, key=key, own=tuple(own), theirs=_mapping(task, columns, own))
    source = _find(task, split, data, places)
    if split == "test":
        return reader.distinct(source, None)
    return reader.distinct(source, lambda: _find(task, "test", data, places))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Something with rows in it, not opened yet."""

    name: str
    unit: str  # what a row's number counts
    remote: bool
    open: Callable[[], Numbered]  # TaskError if it is not there

    def at(self, number: int) -> str:
        return f"{self.name}, {self.unit} {number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """Makes a task's rows from raw ones."""

    task: str
    make: Callable[[Raw], Row]
    key: str
    own: tuple[str, ...]
    theirs: dict[str, str]  # our names of columns -> the source's

    def distinct(self, source: _Source, find_test: Callable[[], _Source] | None) -> Iterator[Row]:
        """The first row of every problem, without those that test has."""
        rows = source.open()
        tested = self._tested(source, find_test) if find_test else set()
        first: dict[str, tuple[int, Row]] = {}
        repeated: list[tuple[int, int]] = []
        leaked: list[int] = []
        for number, problem, row in self._made(source, rows):
            if problem in tested:
                leaked.append(number)
            elif problem not in first:
                first[problem] = number, row
                yield row if row.get("id") is not None else {**row, "id": problem[:16]}
            else:
                self._check_same(source, first[problem], (number, row))
                repeated.append((number, first[problem][0]))
        where, unit = f"{self.task}: {source.name}", source.unit
        if repeated:
            again, before = repeated[0]
            log.warning("%s: repeated rows left out: %d (%s %d is %d again)", where, len(repeated), unit, again, before)
        if leaked:
            log.warning("%s: rows of test left out of train: %d (first: %s %d)", where, len(leaked), unit, leaked[0])
        if not first:
            raise TaskError(f"{where} has no rows" + (" but those that test has too" if leaked else ""))

    def _tested(self, train: _Source, find_test: Callable[[], _Source]) -> set[str]:
        """The problems of test, if it is there; training rows can be had without it, and without a network for it."""
        try:
            test = find_test()
            if test.remote and not train.remote:
                raise TaskError(f"{test.name} is not on this machine")
            rows = test.open()
        except TaskError as error:
            log.debug("%s: train is not compared with test: %s", self.task, error)
            return set()
        return {problem for _, problem, _ in self._made(test, rows)}

    def _made(self, source: _Source, rows: Numbered) -> Iterator[tuple[int, str, Row]]:
        for number, raw in rows:
            at = f"{self.task}: {source.at(number)}"
            if not isinstance(raw, dict):
                raise TaskError(f"{at} is {_short(raw)}, not an object")
            given = self._mapped(at, raw) if self.theirs else raw
            try:
                row = self.make(given)
            except KeyError as error:
                if error.args[0] in given:  # then it is about something else: a bug of `make`
                    raise
                raise TaskError(f'{at} has no column "{error.args[0]}"{_columns(raw)}') from error
            except ValueError as error:
                raise TaskError(f"{at}: {error}{_columns(raw) if {*self.own} - {*given} else ''}") from error
            yield number, _digest(row[self.key]), row

    def _mapped(self, at: str, raw: Raw) -> Raw:
        for name in self.theirs.values():
            if name not in raw:
                raise TaskError(f'{at} has no column "{name}".{nearest(name, raw)}')
        taken = {*self.theirs, *self.theirs.values()}
        kept = {name: value for name, value in raw.items() if name not in taken}
        return kept | {ours: raw[name] for ours, name in self.theirs.items()}

    def _check_same(self, source: _Source, one: tuple[int, Row], other: tuple[int, Row]) -> None:
        """Two rows of one problem agree in all but its spelling and their names."""
        for field in dict.fromkeys((*one[1], *other[1])):
            values = one[1].get(field), other[1].get(field)
            if field not in ("id", self.key) and values[0] != values[1]:
                raise TaskError(
                    f"{self.task}: {source.at(one[0])} and {source.unit} {other[0]} are the same problem "
                    f"({_short(one[1][self.key])}), but their {field} is {_short(values[0])} and {_short(values[1])}; "
                    f"remove one of them"
                )


def _mapping(task: str, columns: Sequence[str], own: Sequence[str]) -> dict[str, str]:
    theirs: dict[str, str] = {}
    for entry in (columns,) if isinstance(columns, str) else columns:
        ours, _, name = entry.partition("=")
        if not ours or not name:
            example = own[0] if own else "question"
            raise TaskError(f'{task}: columns holds "{entry}"; write ours=theirs, as in {example}=NAME')
        if own and ours not in own:
            raise TaskError(f'{task}: columns names "{ours}", which {task} does not read.{nearest(ours, own)}')
        if ours in theirs:
            raise TaskError(f'{task}: columns names "{ours}" twice; say once where it is')
        theirs[ours] = name
    return theirs


def _find(task: str, split: str, data: str, places: Mapping[str, Place]) -> _Source:
    if split not in SPLITS:
        raise TaskError(f'task "{task}" has no split "{split}" in its data; it has {", ".join(SPLITS)}')
    if not data:
        return _default(task, split, places)
    name = data.replace("{split}", split)
    path = Path(os.path.expandvars(os.path.expanduser(name)))
    if _HUB_NAME.fullmatch(name) and path.suffix.lower() not in FORMATS and not os.path.exists(path):
        return _hub(name, split, f"or give the path of a file (there is no file {name})")
    if split == "train" and "{split}" not in data:
        raise TaskError(
            f'{task}: data "{data}" is one file and serves testing only; '
            f"to train, write {{split}} in its name, as in {task}_{{split}}{path.suffix}"
        )
    return _file(path)


def _default(task: str, split: str, places: Mapping[str, Place]) -> _Source:
    if split not in places:
        raise TaskError(f"{task} has no {split} rows of its own; name files with {{split}} in their name as its data")
    place, folder = places[split], os.environ.get(FOLDER, "")
    file = Path(folder).expanduser() / place.file
    if folder and os.path.exists(file):
        return _file(file)
    here = f"put {place.file} into {folder} ({FOLDER})" if folder else f"set {FOLDER} to a folder with {place.file}"
    if not place.hub:
        raise TaskError(f"{task} needs a file with its {split} rows: {here}")
    return _hub(place.hub, place.split, f"or {here}")


def _file(path: Path) -> _Source:
    unit = "line" if path.suffix.lower() == ".jsonl" else "row"
    return _Source(name=str(path), unit=unit, remote=False, open=partial(_open_file, path))


def _open_file(path: Path) -> Numbered:
    """The rows of a file; what can be said without reading them is said at once."""
    if not os.path.exists(path):
        unset = re.search(r"\$\{?([A-Za-z_]\w*)", str(path))
        why = f"${unset[1]} is not set" if unset else "there is no such file"
        raise TaskError(f"cannot read {path}: {why}; give the path of a file ({', '.join(FORMATS)}) or owner/name")
    if path.is_dir():
        raise TaskError(f"cannot read {path}: it is a folder; name a file in it")
    reader = FORMATS.get(path.suffix.lower())
    if reader is None:
        raise TaskError(f"cannot read {path}: the name of a file with rows ends in {', '.join(FORMATS)}")
    return _read_file(path, reader)


def _read_file(path: Path, reader: Callable[[Path], Numbered]) -> Numbered:
    try:
        yield from reader(path)
    except OSError as error:
        raise TaskError(f"cannot read {path}: {error.strerror or _one_line(error)}") from error


def _hub(data_set: str, split: str, remedy: str) -> _Source:
    name = f"{data_set}, split {split}"
    return _Source(name=name, unit="row", remote=True, open=partial(_open_hub, data_set, split, remedy))


def _open_hub(data_set: str, split: str, remedy: str) -> Numbered:
    """The rows of a hub data set, which is in the library's cache when this returns."""
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise TaskError(f"to read {data_set} from the Hugging Face hub, {EXTRA}; {remedy}") from error
    name, _, config = data_set.partition(":")
    try:
        loaded = load_dataset(name, config or None, split=split)
    except (OSError, ValueError, RuntimeError, ImportError, DatasetsError) as error:
        what = f"{data_set}, split {split}, from the Hugging Face hub"
        raise TaskError(f"cannot read {what}: {_one_line(error)}; {remedy}") from error
    return enumerate(_rows_of(loaded), start=1)


def _rows_of(loaded: Any) -> Iterator[Raw]:
    for batch in loaded.iter(batch_size=BATCH):  # a row at a time would be ten times as slow
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Decoded one by one, so that a line that is not text can be named."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise TaskError(f"{path}, line {number} is not UTF-8 text") from error


def _read_jsonl(path: Path) -> Numbered:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            raw = _parse(line)
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{path}, line {number} is not JSON: {_fault(error)}") from error
        yield number, raw


def _read_json(path: Path) -> Numbered:
    text = "".join(line for _, line in _lines(path))
    try:
        rows = _parse(text) if text.strip() else []
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise TaskError(f"{path}{line} is not JSON: {_fault(error)}") from error
    if not isinstance(rows, list):
        raise TaskError(f"{path} is not an array of objects; a file with one object a line is named .jsonl")
    yield from enumerate(rows, start=1)


def _read_csv(path: Path) -> Numbered:
    csv.field_size_limit(MAX_CELL)
    cells = filter(None, csv.reader((line for _, line in _lines(path)), strict=True))  # blank lines have no cells
    number = 0
    try:
        names = next(cells, [])
        if len({*names}) < len(names):
            raise TaskError(f"{path}: two columns have the same name in its first line, which holds the names")
        for number, values in enumerate(cells, start=1):
            if len(values) != len(names):
                raise TaskError(f"{path}, row {number} has {len(values)} cells, but there are {len(names)} columns")
            yield number, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise TaskError(f"{path}, row {number + 1} is not CSV: {error}") from error


def _read_parquet(path: Path) -> Numbered:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise TaskError(f"to read {path}, {EXTRA}") from error
    try:
        with ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=BATCH)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except ArrowException as error:
        raise TaskError(f"cannot read {path}: {_one_line(error)}") from error


FORMATS: dict[str, Callable[[Path], Numbered]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _fault(error: Exception) -> str:
    return f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else str(error)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:20]} is too large a number")
    return value


_JSON = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def _parse(text: str) -> Any:
    """JSON, of which Python's reader takes a little too much."""
    value = _JSON.decode(text)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("it has half a character (a lone surrogate)") from error
    return value


def _digest(problem: Any) -> str:
    """Names a problem by its text, whatever its case and spacing."""
    return blake2b(" ".join(str(problem).casefold().split()).encode(), digest_size=16).hexdigest()


def _columns(raw: Raw) -> str:
    return f" (its columns: {_short([*raw], 200)}; --task.columns ours=theirs gives them other names)"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _short(value: Any, size: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= size else text[: size - 3] + "..."
