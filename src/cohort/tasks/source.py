"""Rows read from a JSON Lines, JSON, CSV or Parquet file, or from a data set of the Hugging Face hub.

A task says how a raw row becomes one of its own rows and which field identifies the problem. Everything else is the
same for all tasks and is done here. No problem is given twice, and no problem of test is in train: problems are
compared by their text, without regard to case and spacing.
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

from cohort.errors import TaskError, shorten_error, suggest_name
from cohort.tasks.formats import BATCH_ROWS, FORMATS, INSTALL_HINT, NumberedRows, RawRow
from cohort.types import Row

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "COHORT_DATA"  # the environment variable that names a folder with data files
SPLITS = ("train", "test")
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The default place of a split's rows, for a task without the setting `data`."""

    file: str  # name of a JSON Lines file in the folder $COHORT_DATA
    hub: str  # Hugging Face data set, "owner/name" or "owner/name:config"; "" if there is none
    split: str  # the name of the split in that data set


def read_rows(
    task: str,
    split: str,
    *,
    data: str,
    columns: Sequence[str],
    places: Mapping[str, Place],
    make: Callable[[RawRow], Row],
    key: str,
    task_columns: Sequence[str] = (),
) -> Iterator[Row]:
    """Returns an iterator over the rows of a task's split in the order of their source, each problem once, with an id.

    `data` and `columns` are settings of the task. `data` is a path (perhaps with {split}, ~ or $NAME), the name of a
    hub data set, or "" for the default `places` by split; a path without {split} is for "test" only. `columns` has an
    entry "ours=theirs" for every column that has another name in the source. `make` turns a raw row into a row of the
    task, or raises ValueError with what is wrong. `key` is the field of the made row that identifies the problem; a row
    without an "id" gets a hash of it. The `task_columns` are those that `make` reads: if given, an entry of `columns`
    for any other name is refused.

    Raises TaskError at once for bad `columns`, an unknown split and a path or place that cannot serve the split. Raises
    it while rows are read, with file and line where possible, for a source that cannot be opened, a bad row, two rows
    with the same id, one problem with two contents, and a source without rows. Repeated rows, and rows of train that
    are in a test split that can be opened, are left out; warnings at the end count them.
    """
    reader = _Reader(
        task=task,
        make=make,
        key=key,
        task_columns=tuple(task_columns),
        source_columns=_parse_columns(task, columns, task_columns),
    )
    source = _find_source(task, split, data, places)
    if split == "test":
        return reader.read_distinct(source, None)
    return reader.read_distinct(source, lambda: _find_source(task, "test", data, places))


def make_data_path_absolute(data: str) -> str:
    """Returns the setting `data` as an absolute path if it names a file or folder that exists, otherwise unchanged.

    {split} may stand for train or test and stays in the result; ~ and $NAME are not expanded. A run may be resumed from
    another working directory, where a relative path would name another file.
    """
    exists = any(os.path.exists(data.replace("{split}", split)) for split in SPLITS)
    return os.path.abspath(data) if exists else data


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """A file or hub data set with rows, not opened yet."""

    name: str  # for messages
    unit: str  # what the number of a row counts: "line" or "row"
    remote: bool  # whether opening it may need the network
    open: Callable[[], NumberedRows]  # raises TaskError if the source does not exist

    def describe_row(self, number: int) -> str:
        """Returns the place of a row for a message, as in "rows.csv, line 7"."""
        return f"{self.name}, {self.unit} {number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """Makes a task's rows from raw ones. The fields are the arguments of `read_rows`."""

    task: str
    make: Callable[[RawRow], Row]
    key: str
    task_columns: tuple[str, ...]
    source_columns: dict[str, str]  # the task's name of a column -> its name in the source

    def read_distinct(self, source: _Source, find_test: Callable[[], _Source] | None) -> Iterator[Row]:
        """Yields the first row of every problem in `source`, with an id, without the problems of the test split.

        A training split passes `find_test`, which returns the source of the test split; None = `source` is the test
        split. Warnings at the end count repeated rows and rows of test. Raises TaskError for a bad row, two rows with
        the same id, one problem with two contents, and if no row is left.
        """
        # Opened first: an error about `source` itself comes before any about the test split.
        rows = source.open()
        tested = self._read_test_problems(source, find_test) if find_test else set()
        first: dict[str, tuple[int, Row]] = {}  # hash of a problem -> number and content of its first row
        id_numbers: dict[str, int] = {}  # id of a row -> its number
        repeated: list[tuple[int, int]] = []  # numbers of a repeated row and of the first row of its problem
        leaked: list[int] = []  # numbers of training rows whose problem is in test
        for number, problem, row in self._make_rows(source, rows):
            if problem in tested:
                leaked.append(number)
            elif problem not in first:
                first[problem] = number, row
                if (id := row.get("id")) is not None and id_numbers.setdefault(str(id), number) != number:
                    both = f"{source.describe_row(id_numbers[str(id)])} and {source.unit} {number}"
                    raise TaskError(
                        f"{self.task}: {both} have the same id {_shorten(id)}; give each its own id in the data"
                    )
                yield row if row.get("id") is not None else {**row, "id": problem[:16]}
            else:
                self._check_same_content(source, first[problem], (number, row))
                repeated.append((number, first[problem][0]))
        where, unit = f"{self.task}: {source.name}", source.unit
        if repeated:
            later, earlier = repeated[0]
            log.warning(
                "%s: repeated rows left out: %d (first: %s %d repeats %d)", where, len(repeated), unit, later, earlier
            )
        if leaked:
            log.warning("%s: rows of test left out of train: %d (first: %s %d)", where, len(leaked), unit, leaked[0])
        if not first:
            but_test = " except rows that are also in test" if leaked else ""
            raise TaskError(f"{where} has no rows{but_test}; add rows or name another source with --task.data")

    def _read_test_problems(self, train: _Source, find_test: Callable[[], _Source]) -> set[str]:
        """Returns the hashes of the problems of the test split; an empty set if that split cannot be found or opened.

        A test split on the hub counts as one that cannot be opened if `train` is a file. A bad row in a test split that
        is open raises TaskError.
        """
        try:
            test = find_test()
            # Training rows that are on this machine must be readable without a network.
            if test.remote and not train.remote:
                raise TaskError(
                    f"the training rows are a file, but the test rows are on the hub ({test.name}) and were not read; "
                    "give the test rows as a file too"
                )
            rows = test.open()
        except TaskError as error:
            # A run that only trains needs no test rows, so their absence is no error here.
            log.debug("%s: train is not compared with test: %s", self.task, error)
            return set()
        return {problem for _, problem, _ in self._make_rows(test, rows)}

    def _make_rows(self, source: _Source, rows: NumberedRows) -> Iterator[tuple[int, str, Row]]:
        """Yields (number, hash of its problem, row of the task) for every raw row, repeated ones too.

        Raises TaskError for a raw row that is no dict, that lacks a column, or that `make` refuses with ValueError.
        """
        for number, raw in rows:
            where = f"{self.task}: {source.describe_row(number)}"
            if not isinstance(raw, dict):
                raise TaskError(
                    f"{where} is {_shorten(raw)}; correct it: a row must be a JSON object with the columns as keys"
                )
            renamed = self._rename_columns(where, raw) if self.source_columns else raw
            try:
                row = self.make(renamed)
            except KeyError as error:
                # A column that is there is not the missing key: the error is a bug in `make`.
                if error.args[0] in renamed:
                    raise
                name = error.args[0]
                raise TaskError(
                    f'{where} has no column "{name}"; it has {_list_columns(raw)}. Add it, or set '
                    f"--task.columns {name}=COLUMN if it has another name there"
                ) from error
            except ValueError as error:
                # The columns are listed only if one that `make` reads is missing: then its name may be the cause.
                missing = [name for name in self.task_columns if name not in renamed]
                if not missing:
                    raise TaskError(f"{where}: {error}; correct this row") from error
                raise TaskError(
                    f"{where}: {error}. Correct this row, or, if one of its columns "
                    f"{_list_columns(raw)} is meant, set --task.columns NAME=COLUMN for NAME among {', '.join(missing)}"
                ) from error
            yield number, _hash_problem(row[self.key]), row

    def _rename_columns(self, where: str, raw: RawRow) -> RawRow:
        """Returns a new raw row with columns renamed to the task's names.

        Other columns keep their names, but one that has the task's name of a mapped column is dropped. Raises TaskError
        if a column that the setting `columns` names is missing. `where` is the row's place, for the error message.
        """
        for name in self.source_columns.values():
            if name not in raw:
                raise TaskError(
                    f'{where} has no column "{name}"; correct the name in --task.columns.{suggest_name(name, raw)}'
                )
        # A column of the source that already has the task's name is dropped: the user said that another one is meant.
        mentioned = {*self.source_columns, *self.source_columns.values()}
        kept = {name: value for name, value in raw.items() if name not in mentioned}
        return kept | {ours: raw[name] for ours, name in self.source_columns.items()}

    def _check_same_content(self, source: _Source, one: tuple[int, Row], other: tuple[int, Row]) -> None:
        """Raises TaskError unless two rows of one problem, each given as (number, row), have the same content.

        Their ids and the spelling of the problem may differ.
        """
        one_number, one_row = one
        other_number, other_row = other
        for field in dict.fromkeys((*one_row, *other_row)):
            values = one_row.get(field), other_row.get(field)
            if field not in ("id", self.key) and values[0] != values[1]:
                raise TaskError(
                    f"{self.task}: {source.describe_row(one_number)} and {source.unit} {other_number} "
                    f"are the same problem ({_shorten(one_row[self.key])}), "
                    f"but their {field} is {_shorten(values[0])} and {_shorten(values[1])}; remove the wrong row"
                )


def _parse_columns(task: str, columns: Sequence[str], task_columns: Sequence[str]) -> dict[str, str]:
    """Returns a dict from the task's name of a column to its name in the source, read from the setting `columns`.

    Raises TaskError for an entry that is not "ours=theirs", for a name of ours that occurs twice, and for one that is
    not in `task_columns`, unless these are empty. A plain string is one entry.
    """
    source_columns: dict[str, str] = {}
    for entry in (columns,) if isinstance(columns, str) else columns:
        ours, _, theirs = entry.partition("=")
        if not ours or not theirs:
            example = task_columns[0] if task_columns else "question"
            raise TaskError(
                f'{task}: --task.columns has the entry "{entry}"; write the column that {task} reads, "=" and its name '
                f"in the data, as in {example}=NAME"
            )
        if task_columns and ours not in task_columns:
            hint = suggest_name(ours, task_columns)
            raise TaskError(
                f'{task}: columns has "{ours}=", but {task} reads no such column; correct --task.columns.{hint}'
            )
        if ours in source_columns:
            raise TaskError(f'{task}: --task.columns has two entries for "{ours}"; keep one of them')
        source_columns[ours] = theirs
    return source_columns


def _find_source(task: str, split: str, data: str, places: Mapping[str, Place]) -> _Source:
    """Returns the file or hub data set that holds a split, from the setting `data` or, if that is "", from `places`.

    Opens nothing. Raises TaskError for a split other than train and test, for "train" of a file without {split} in its
    name, and if `places` has nothing for the split. A file in `data` need not exist yet.
    """
    if split not in SPLITS:
        raise TaskError(f'task "{task}" has no split "{split}" in its data; use one of {", ".join(SPLITS)}')
    if not data:
        return _find_default_source(task, split, places)
    name = data.replace("{split}", split)
    path = Path(os.path.expandvars(os.path.expanduser(name)))
    # "owner/name" may also be a relative path: it is a hub data set unless there is a file or it ends like one.
    if _HUB_NAME.fullmatch(name) and path.suffix.lower() not in FORMATS and not os.path.exists(path):
        return _make_hub_source(name, split, f"or give the path of a file (there is no file {name})")
    if split == "train" and "{split}" not in data:
        example = f"{task}_{{split}}{path.suffix}"
        raise TaskError(
            f'{task}: data is "{data}", one path, which is for testing only. To train, have one file with "train" and '
            f'one with "test" in its name, and write the word split in braces there: --task.data {example}'
        )
    return _make_file_source(path)


def _find_default_source(task: str, split: str, places: Mapping[str, Place]) -> _Source:
    """Returns the default source of a split: the file in the folder $COHORT_DATA if it exists, else the hub data set.

    Raises TaskError if there is neither, and if `places` has no entry for the split.
    """
    if split not in places:
        example = f"{task}_{{split}}.jsonl"
        raise TaskError(
            f"{task} comes without {split} rows; put rows of your own into a file with {split} in its name, and "
            f"write the word split in braces there: --task.data {example}"
        )
    place = places[split]
    folder = os.environ.get(FOLDER_VARIABLE, "")
    file = Path(folder).expanduser() / place.file
    if folder and os.path.exists(file):
        return _make_file_source(file)
    if folder:
        remedy = f"put {place.file} into {folder}, the folder that {FOLDER_VARIABLE} names"
    else:
        remedy = f"set {FOLDER_VARIABLE} to a folder with {place.file}"
    if not place.hub:
        raise TaskError(
            f"{task} needs the file {place.file} with its {split} rows; set the environment variable {FOLDER_VARIABLE} "
            f"(now: {folder or 'not set'}) to a folder that has it"
        )
    return _make_hub_source(place.hub, place.split, f"or {remedy}")


def _make_file_source(path: Path) -> _Source:
    """Returns the source of a file's rows. The file is not read until the source is opened."""
    unit = "line" if path.suffix.lower() in (".jsonl", ".csv") else "row"
    return _Source(name=str(path), unit=unit, remote=False, open=partial(_open_file, path))


def _open_file(path: Path) -> NumberedRows:
    """Returns an iterator over the numbered rows of a file.

    Raises TaskError now, before any row is read, if the file does not exist, is a folder, or has an unknown ending.
    """
    if not os.path.exists(path):
        # A variable that is not set stays in the path as "$NAME".
        unset = re.search(r"\$\{?([A-Za-z_]\w*)", str(path))
        if unset:
            raise TaskError(
                f"cannot read {path}: the environment variable {unset[1]} is not set; set it, or correct --task.data"
            )
        raise TaskError(
            f"cannot read {path}: there is no such file; set --task.data to the path of a file ({', '.join(FORMATS)}) "
            "or to owner/name of a data set on the Hugging Face hub"
        )
    if path.is_dir():
        raise TaskError(f"cannot read {path}: it is a folder; name a file with rows in it instead")
    reader = FORMATS.get(path.suffix.lower())
    if reader is None:
        raise TaskError(f"cannot read {path}: its name must end in one of {', '.join(FORMATS)}; rename or convert it")
    return _read_file(path, reader)


def _read_file(path: Path, reader: Callable[[Path], NumberedRows]) -> NumberedRows:
    """Yields the numbered rows that `reader` reads from a file. An OSError of the reader becomes a TaskError."""
    try:
        yield from reader(path)
    except OSError as error:
        raise TaskError(
            f"cannot read {path}: {error.strerror or shorten_error(error)}; check its permissions and the disk"
        ) from error


def _make_hub_source(data_set: str, split: str, remedy: str) -> _Source:
    """Returns the source of a hub data set's split; nothing is downloaded yet.

    Its error messages end with `remedy`: what else the user can do.
    """
    name = f"{data_set}, split {split}"
    return _Source(name=name, unit="row", remote=True, open=partial(_open_hub, data_set, split, remedy))


def _open_hub(data_set: str, split: str, remedy: str) -> NumberedRows:
    """Returns an iterator over the rows of a hub data set's split, numbered from 1.

    Downloads the data set first if it is not in the cache. Raises TaskError, which ends with `remedy`, if that fails or
    if the package datasets is not installed.
    """
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise TaskError(
            f"reading {data_set} from the Hugging Face hub needs the package datasets; run {INSTALL_HINT}, {remedy}"
        ) from error
    name, _, config = data_set.partition(":")
    try:
        loaded = load_dataset(name, config or None, split=split)
    except (OSError, ValueError, RuntimeError, ImportError, DatasetsError) as error:
        raise TaskError(
            f"cannot read {data_set}, split {split}, from the Hugging Face hub: {shorten_error(error)}; "
            f"check the name of the data set, its split and the network, {remedy}"
        ) from error
    return enumerate(_iterate_rows(loaded), start=1)


def _iterate_rows(loaded: Any) -> Iterator[RawRow]:
    """Yields the rows of a hub data set, as `datasets` loaded it, as dicts."""
    # Reading row by row instead of in batches is ten times as slow.
    for batch in loaded.iter(batch_size=BATCH_ROWS):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _hash_problem(problem: Any) -> str:
    """Returns a hash of a problem's text as 32 hexadecimal digits. It does not depend on case and spacing."""
    return blake2b(" ".join(str(problem).casefold().split()).encode(), digest_size=16).hexdigest()


def _list_columns(raw: RawRow) -> str:
    """Returns the names of a raw row's columns as a list in text, cut after 200 characters, for error messages."""
    return _shorten([*raw], 200)


def _shorten(value: Any, size: int = 60) -> str:
    """Returns the repr of a value; one longer than `size` characters is cut to that size, with "..." at its end."""
    text = repr(value)
    return text if len(text) <= size else text[: size - 3] + "..."
