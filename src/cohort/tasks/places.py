"""Where raw rows are: in files, or in data sets of the Hugging Face hub. And what their columns are called.

Raw rows are those of the source: nothing is known about them yet. `source` makes rows of tasks from them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cohort.errors import TaskError, shorten_error, suggest_name
from cohort.system.paths import expand_home
from cohort.tasks.formats import BATCH_ROWS, FORMATS, INSTALL_HINT, NumberedRows, RawRow

FOLDER_VARIABLE = "COHORT_DATA"  # the environment variable that names a folder with data files
SPLITS = ("train", "test")
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")


# The settings of tasks that say where rows are, as flags, for messages.
DATA_FLAG = "--task.data"
COLUMNS_FLAG = "--task.columns"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The default place of a split's rows, for a task without the setting `data`."""

    file: str  # name of a JSON Lines file in the folder $COHORT_DATA
    hub: str  # Hugging Face data set, "owner/name" or "owner/name:config"; "" if there is none
    split: str  # the name of the split in that data set


def make_data_path_absolute(data: str, splits: Sequence[str] = SPLITS) -> str:
    """Returns the setting `data` as an absolute path if it names a file or folder that exists, otherwise unchanged.

    {split} may stand for one of `splits` and stays in the result; ~ and $NAME are not expanded. A run may be resumed
    from another working directory, where a relative path would name another file.
    """
    exists = any(os.path.exists(data.replace("{split}", split)) for split in splits)
    return os.path.abspath(data) if exists else data


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSource:
    """A file or hub data set with rows, not opened yet."""

    name: str  # for messages
    unit: str  # what the number of a row counts: "line" or "row"
    remote: bool  # whether opening it may need the network
    open: Callable[[], NumberedRows]  # raises TaskError if the source does not exist
    path: Path | None = None  # that of a file

    def describe_row(self, number: int) -> str:
        """Returns the place of a row for a message, as in "rows.csv, line 7"."""
        return f"{self.name}, {self.unit} {number}"


def find_source(task: str, split: str, data: str, places: Mapping[str, Place]) -> RowSource:
    """Returns the file or hub data set that holds a split, from the setting `data` or, if that is "", from `places`.

    Opens nothing. Raises TaskError for a split other than train and test, for "train" of a file without {split} in its
    name, and if `places` has nothing for the split. A file in `data` need not exist yet.
    """
    if split not in SPLITS:
        raise TaskError(f'task "{task}" has no split "{split}" in its data; use one of {", ".join(SPLITS)}')
    if not data:
        return _find_default_source(task, split, places)
    source = locate_rows(data, split)
    if split == "train" and "{split}" not in data and not source.remote:
        example = f"{task}_{{split}}{Path(data).suffix}"
        raise TaskError(
            f'{task}: data is "{data}", one path, which is for testing only. To train, have one file with "train" and '
            f'one with "test" in its name, and write the word split in braces there: {DATA_FLAG} {example}'
        )
    return source


def lacks_test_file(data: str) -> bool:
    """Returns whether a path with {split} names a training file that exists and a test file that does not."""
    if "{split}" not in data:
        return False
    train, test = (os.path.expandvars(os.path.expanduser(data.replace("{split}", split))) for split in SPLITS)
    return os.path.exists(train) and not os.path.exists(test)


def locate_rows(data: str, split: str, flag: str = DATA_FLAG) -> RowSource:
    """Returns the source that a setting names: the path of a file, or owner/name of a data set on the hub.

    {split} in `data` stands for the split; ~ and $NAME are expanded. Opens nothing: a file need not exist yet. `flag`
    is the setting, for messages.
    """
    name = data.replace("{split}", split)
    path = Path(os.path.expandvars(os.path.expanduser(name)))
    # "owner/name" may also be a relative path: it is a hub data set unless there is a file or it ends like one.
    if _HUB_NAME.fullmatch(name) and path.suffix.lower() not in FORMATS and not os.path.exists(path):
        # The splits of a task have fixed names on the hub. Those of rows that are imitated have settings.
        flags = "" if flag == DATA_FLAG else " (--data.train-split, --data.test-split)"
        return _make_hub_source(name, split, f"or give the path of a file (there is no file {name})", flags)
    return _make_file_source(path, flag)


def select_split(source: RowSource, split: str, column: str) -> RowSource:
    """Returns the rows of a source whose `column` holds the name of the split: one file with rows of all splits.

    Rows without that column are for testing: opened for another split, they raise TaskError.
    """
    return replace(source, open=partial(_open_split, source, split, column))


def _open_split(source: RowSource, split: str, column: str) -> NumberedRows:
    """Opens the source now, and returns an iterator over the numbered rows of a split."""
    return _select_rows(source, source.open(), split, column)


def _select_rows(source: RowSource, rows: NumberedRows, split: str, column: str) -> NumberedRows:
    """Yields the numbered rows of a split. What is no row at all is passed on, for the message of the reader."""
    for number, raw in rows:
        if isinstance(raw, dict) and column not in raw and split != "test":
            raise TaskError(
                f'{source.describe_row(number)} has no column "{column}", so all rows are for testing. To train, add '
                f'it with "train" or "test" in every row, or have one file per split: {DATA_FLAG} NAME_{{split}}.jsonl'
            )
        if not isinstance(raw, dict) or raw.get(column, "test") == split:
            yield number, raw


def _find_default_source(task: str, split: str, places: Mapping[str, Place]) -> RowSource:
    """Returns the default source of a split: the file in the folder $COHORT_DATA if it exists, else the hub data set.

    Raises TaskError if there is neither, and if `places` has no entry for the split.
    """
    if split not in places:
        example = f"{task}_{{split}}.jsonl"
        raise TaskError(
            f"{task} comes without {split} rows; put rows of your own into a file with {split} in its name, and "
            f"write the word split in braces there: {DATA_FLAG} {example}"
        )
    place = places[split]
    folder = os.environ.get(FOLDER_VARIABLE, "")
    file = expand_home(folder) / place.file
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


def _make_file_source(path: Path, flag: str = DATA_FLAG) -> RowSource:
    """Returns the source of a file's rows. The file is not read until the source is opened."""
    unit = "line" if path.suffix.lower() in (".jsonl", ".csv") else "row"
    return RowSource(name=str(path), unit=unit, remote=False, open=partial(_open_file, path, flag), path=path)


def _open_file(path: Path, flag: str) -> NumberedRows:
    """Returns an iterator over the numbered rows of a file.

    Raises TaskError now, before any row is read, if the file does not exist, is a folder, or has an unknown ending.
    """
    if not os.path.exists(path):
        # A variable that is not set stays in the path as "$NAME".
        unset = re.search(r"\$\{?([A-Za-z_]\w*)", str(path))
        if unset:
            raise TaskError(
                f"cannot read {path}: the environment variable {unset[1]} is not set; set it, or correct {flag}"
            )
        raise TaskError(
            f"cannot read {path}: there is no such file; set {flag} to the path of a file ({', '.join(FORMATS)}) "
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


def _make_hub_source(data_set: str, split: str, remedy: str, flags: str = "") -> RowSource:
    """Returns the source of a hub data set's split; nothing is downloaded yet.

    Its error messages end with `remedy`: what else the user can do. `flags` are the settings that name the split, in
    brackets; "" = there are none.
    """
    name = f"{data_set}, split {split}"
    return RowSource(name=name, unit="row", remote=True, open=partial(_open_hub, data_set, split, remedy, flags))


def _open_hub(data_set: str, split: str, remedy: str, flags: str) -> NumberedRows:
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
            f"check the name of the data set, its split{flags} and the network, {remedy}"
        ) from error
    return enumerate(_iterate_rows(loaded), start=1)


def _iterate_rows(loaded: Any) -> Iterator[RawRow]:
    """Yields the rows of a hub data set, as `datasets` loaded it, as dicts."""
    # Reading row by row instead of in batches is ten times as slow.
    for batch in loaded.iter(batch_size=BATCH_ROWS):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def parse_columns(
    task: str, columns: Sequence[str], task_columns: Sequence[str], flag: str = COLUMNS_FLAG
) -> dict[str, str]:
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
                f'{task}: {flag} has the entry "{entry}"; write the column that {task} reads, "=" and its name '
                f"in the data, as in {example}=NAME"
            )
        if task_columns and ours not in task_columns:
            hint = suggest_name(ours, task_columns)
            raise TaskError(f'{task}: columns has "{ours}=", but {task} reads no such column; correct {flag}.{hint}')
        if ours in source_columns:
            raise TaskError(f'{task}: {flag} has two entries for "{ours}"; keep one of them')
        source_columns[ours] = theirs
    return source_columns


def rename_columns(where: str, raw: RawRow, source_columns: Mapping[str, str], flag: str = COLUMNS_FLAG) -> RawRow:
    """Returns a new raw row with columns renamed to our names. `source_columns` maps these to those of the source.

    Other columns keep their names, but one that has our name of a mapped column is dropped. Raises TaskError if a
    mapped column is missing. `where` is the row's place, and `flag` the setting that maps columns, for the message.
    """
    for name in source_columns.values():
        if name not in raw:
            raise TaskError(f'{where} has no column "{name}"; correct the name in {flag}.{suggest_name(name, raw)}')
    # A column of the source that already has our name is dropped: the user said that another one is meant.
    mentioned = {*source_columns, *source_columns.values()}
    kept = {name: value for name, value in raw.items() if name not in mentioned}
    return kept | {ours: raw[name] for ours, name in source_columns.items()}


def list_columns(raw: RawRow) -> str:
    """Returns the names of a raw row's columns as a list in text, cut after 200 characters, for error messages."""
    return shorten([*raw], 200)


def shorten(value: Any, size: int = 60) -> str:
    """Returns the repr of a value; one longer than `size` characters is cut to that size, with "..." at its end."""
    text = repr(value)
    return text if len(text) <= size else text[: size - 3] + "..."
