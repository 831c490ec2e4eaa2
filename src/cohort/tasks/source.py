"""Rows that lie somewhere: in a JSON Lines, JSON, CSV or Parquet file, or in a data set of the Hugging Face hub.

A task says how a raw row becomes one of its own and which field names the problem; the rest is the same for all of
them and is here. No problem is given twice, and no problem of test is in train: problems are compared by their text
with case and spacing put aside.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cohort.errors import TaskError, brief, nearest
from cohort.tasks.formats import BATCH, EXTRA, FORMATS, Numbered, Raw
from cohort.types import Row

log = logging.getLogger(__name__)

FOLDER = "COHORT_DATA"
SPLITS = ("train", "test")
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")


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


def from_anywhere(data: str) -> str:
    """The knob `data` with the path of a file that is here made absolute: a run may be resumed from another folder."""
    here = any(os.path.exists(data.replace("{split}", split)) for split in SPLITS)
    return os.path.abspath(data) if here else data


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
        named: dict[str, int] = {}
        repeated: list[tuple[int, int]] = []
        leaked: list[int] = []
        for number, problem, row in self._made(source, rows):
            if problem in tested:
                leaked.append(number)
            elif problem not in first:
                first[problem] = number, row
                if (id := row.get("id")) is not None and named.setdefault(str(id), number) != number:
                    at = f"{self.task}: {source.at(named[str(id)])} and {source.unit} {number}"
                    raise TaskError(f"{at} have the same id {_short(id)}; give each its own")
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
    unit = "line" if path.suffix.lower() in (".jsonl", ".csv") else "row"
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
        raise TaskError(f"cannot read {path}: {error.strerror or brief(error)}") from error


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
        raise TaskError(f"cannot read {what}: {brief(error)}; {remedy}") from error
    return enumerate(_rows_of(loaded), start=1)


def _rows_of(loaded: Any) -> Iterator[Raw]:
    for batch in loaded.iter(batch_size=BATCH):  # a row at a time would be ten times as slow
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _digest(problem: Any) -> str:
    """Names a problem by its text, whatever its case and spacing."""
    return blake2b(" ".join(str(problem).casefold().split()).encode(), digest_size=16).hexdigest()


def _columns(raw: Raw) -> str:
    return f" (its columns: {_short([*raw], 200)}; --task.columns ours=theirs gives them other names)"


def _short(value: Any, size: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= size else text[: size - 3] + "..."
