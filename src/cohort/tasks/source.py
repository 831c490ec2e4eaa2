"""Rows read from a JSON Lines, JSON, CSV or Parquet file, or from a data set of the Hugging Face hub.

A task says how a raw row becomes one of its own rows and which field identifies the problem. Everything else is the
same for all tasks and is done here. No problem is given twice, and no problem of test is in train: problems are
compared by their text, without regard to case and spacing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from cohort.errors import TaskError
from cohort.tasks.formats import NumberedRows, RawRow
from cohort.tasks.places import (
    Place,
    RowSource,
    find_source,
    lacks_test_file,
    list_columns,
    parse_columns,
    rename_columns,
    shorten,
)
from cohort.types import Row

log = logging.getLogger(__name__)


class UnusableRow(ValueError):
    """A row that has its columns, but cannot be used. The message says why, and what to do."""


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
    task, or raises ValueError with what is wrong: UnusableRow if no column can be the cause. `key` is the field of the
    made row that identifies the problem; a row without an "id" gets a hash of it. The `task_columns` are those that
    `make` reads: if given, an entry of `columns` for any other name is refused.

    Raises TaskError at once for bad `columns`, an unknown split and a path or place that cannot serve the split. Raises
    it while rows are read, with file and line where possible, for a source that cannot be opened, a bad row, two rows
    with the same id, one problem with two contents, and a source without rows. Repeated rows, and rows of train that
    are in a test split that can be opened, are left out; warnings at the end count them. A test file that is missing
    beside a training file has no rows, with a warning.
    """
    if is_without_test_rows(task, split, data):
        return iter(())
    source = find_source(task, split, data, places)
    return read_sources(
        task,
        source,
        None if split == "test" else lambda: find_source(task, "test", data, places),
        columns=columns,
        make=make,
        key=key,
        task_columns=task_columns,
    )


def is_without_test_rows(task: str, split: str, data: str) -> bool:
    """Returns whether `split` is "test" and `data` names a training file without a test file, with a warning then."""
    if split != "test" or not lacks_test_file(data):
        return False
    log.warning("%s: there is no file %s, so there are no test rows", task, data.replace("{split}", "test"))
    return True


def read_sources(
    task: str,
    source: RowSource,
    find_test: Callable[[], RowSource] | None,
    *,
    columns: Sequence[str],
    make: Callable[[RawRow], Row],
    key: str,
    task_columns: Sequence[str] = (),
) -> Iterator[Row]:
    """Returns an iterator over the rows of a source, as `read_rows` does, for a task that finds its sources itself.

    `find_test` returns the source of the test rows, whose problems are left out; None = `source` is that one.
    """
    reader = _Reader(
        task=task,
        make=make,
        key=key,
        task_columns=tuple(task_columns),
        source_columns=parse_columns(task, columns, task_columns),
    )
    return reader.read_distinct(source, find_test)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """Makes a task's rows from raw ones. The fields are the arguments of `read_rows`."""

    task: str
    make: Callable[[RawRow], Row]
    key: str
    task_columns: tuple[str, ...]
    source_columns: dict[str, str]  # the task's name of a column -> its name in the source

    def read_distinct(self, source: RowSource, find_test: Callable[[], RowSource] | None) -> Iterator[Row]:
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
                        f"{self.task}: {both} have the same id {shorten(id)}; give each its own id in the data"
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

    def _read_test_problems(self, train: RowSource, find_test: Callable[[], RowSource]) -> set[str]:
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

    def _make_rows(self, source: RowSource, rows: NumberedRows) -> Iterator[tuple[int, str, Row]]:
        """Yields (number, hash of its problem, row of the task) for every raw row, repeated ones too.

        Raises TaskError for a raw row that is no dict, that lacks a column, or that `make` refuses with ValueError.
        """
        for number, raw in rows:
            where = f"{self.task}: {source.describe_row(number)}"
            if not isinstance(raw, dict):
                raise TaskError(
                    f"{where} is {shorten(raw)}; correct it: a row must be a JSON object with the columns as keys"
                )
            renamed = rename_columns(where, raw, self.source_columns)
            try:
                row = self.make(renamed)
            except KeyError as error:
                # A column that is there is not the missing key: the error is a bug in `make`.
                if error.args[0] in renamed:
                    raise
                name = error.args[0]
                raise TaskError(
                    f'{where} has no column "{name}"; it has {list_columns(raw)}. Add it, or set '
                    f"--task.columns {name}=COLUMN if it has another name there"
                ) from error
            except UnusableRow as error:
                raise TaskError(f"{where}: {error}") from error
            except ValueError as error:
                # The columns are listed only if one that `make` reads is missing: then its name may be the cause.
                missing = [name for name in self.task_columns if name not in renamed]
                # Those that the message is about. Others may be missing because the task can do without them.
                meant = [name for name in missing if name in re.findall(r"\w+", str(error))]
                if not meant:
                    raise TaskError(f"{where}: {error}; correct this row") from error
                raise TaskError(
                    f'{where} has no column "{meant[0]}" ({error}); it has {list_columns(raw)}. If one of these is '
                    f"meant, set --task.columns {' '.join(f'{name}=COLUMN' for name in meant)}; if not, add the column"
                ) from error
            yield number, _hash_problem(row[self.key]), row

    def _check_same_content(self, source: RowSource, one: tuple[int, Row], other: tuple[int, Row]) -> None:
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
                    f"are the same problem ({shorten(one_row[self.key])}), "
                    f"but their {field} is {shorten(values[0])} and {shorten(values[1])}; remove the wrong row"
                )


def _hash_problem(problem: Any) -> str:
    """Returns a hash of a problem's text as 32 hexadecimal digits. It does not depend on case and spacing."""
    return blake2b(" ".join(str(problem).casefold().split()).encode(), digest_size=16).hexdigest()
