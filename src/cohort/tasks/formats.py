"""Readers of files with rows, chosen by the ending of the file name: JSON Lines, JSON, CSV, Parquet."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cohort.errors import TaskError, shorten_error

INSTALL_HINT = "pip install 'cohort[data]'"
# Characters in a cell of a CSV file. The csv module's own limit is shorter than a long solution.
MAX_CELL = 2**30
BATCH_ROWS = 1000  # rows that are read at once from Parquet files and hub data sets
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # the escape of a surrogate, half a character in UTF-16

RawRow = dict[str, Any]
NumberedRows = Iterator[tuple[int, Any]]
"""Raw rows, each with its number from 1: that of its line in JSON Lines and CSV files, that of the row elsewhere."""


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number, line) for the lines of a text file, numbered from 1. A line keeps its line break.

    A byte order mark at the beginning is dropped. Raises TaskError for a line that is not UTF-8.
    """
    # Lines are decoded one by one: decoding the whole file could not tell which line is not text.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise TaskError(
                    f"{path}, line {number} is not UTF-8 text; save the file in the encoding UTF-8"
                ) from error


def _read_jsonl(path: Path) -> NumberedRows:
    """Yields (line number, value) for a JSON Lines file; blank lines are skipped. Values may be of any JSON type.

    Raises TaskError for a line that is not JSON or not UTF-8.
    """
    for number, line in _read_lines(path):
        if not line.strip():
            continue
        try:
            raw = _parse_json(line)
        except (ValueError, RecursionError) as error:
            raise TaskError(
                f"{path}, line {number} cannot be read as JSON: {_describe_error(error)}; correct it: every line must "
                "be one JSON object"
            ) from error
        yield number, raw


def _read_json(path: Path) -> NumberedRows:
    """Yields (number, item) for the array in a JSON file, numbered from 1; nothing for an empty file.

    Raises TaskError if the file is not a JSON array or not UTF-8.
    """
    text = "".join(line for _, line in _read_lines(path))
    try:
        rows = _parse_json(text) if text.strip() else []
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise TaskError(
            f"{path}{line} cannot be read as JSON: {_describe_error(error)}; correct it to one array of objects, or "
            "rename the file to .jsonl if it has one object per line"
        ) from error
    if not isinstance(rows, list):
        raise TaskError(
            f"{path} is JSON, but not an array; make it an array of objects, or "
            "rename the file to .jsonl if it has one object per line"
        )
    yield from enumerate(rows, start=1)


def _read_csv(path: Path) -> NumberedRows:
    """Yields (line number, row) for a CSV file; rows are dicts of text. Its first line names the columns.

    The number is that of the row's first line; blank lines are skipped. Raises TaskError for a line that is not CSV,
    not UTF-8 or has another number of cells, and for two columns of the same name. Sets the csv module's cell size
    limit for the whole process.
    """
    csv.field_size_limit(MAX_CELL)
    reader = csv.reader((line for _, line in _read_lines(path)), strict=True)
    names: list[str] = []
    # The line where the current row begins. A cell may hold line breaks, so a row may take several lines.
    number = 1
    try:
        for values in reader:
            if values and not names:
                names = values
                if len({*names}) < len(names):
                    raise TaskError(f"{path}: its header line names two columns alike; rename one of them there")
            elif values:  # blank lines have no cells
                if len(values) != len(names):
                    raise TaskError(
                        f"{path}, line {number} has {len(values)} cells, but the header line names {len(names)} columns"
                        "; correct that line, or quote cells that contain a comma"
                    )
                yield number, dict(zip(names, values, strict=True))
            number = reader.line_num + 1
    except csv.Error as error:
        raise TaskError(
            f"{path}, line {number} is not CSV: {error}; correct the quotation marks or line breaks there"
        ) from error


def _read_parquet(path: Path) -> NumberedRows:
    """Yields (number, row) for a Parquet file, numbered from 1; rows are dicts.

    Raises TaskError if pyarrow is not installed or the file cannot be read.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise TaskError(
            f"reading {path} needs the package pyarrow, which is not installed; run {INSTALL_HINT}"
        ) from error
    try:
        with ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=BATCH_ROWS)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except ArrowException as error:
        raise TaskError(f"cannot read {path}: {shorten_error(error)}; replace it by a complete Parquet file") from error


# Readers by the ending of the file name. They raise TaskError for a malformed file and OSError for an unreadable one.
FORMATS: dict[str, Callable[[Path], NumberedRows]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _describe_error(error: Exception) -> str:
    """Returns the message of an error; for a JSON error with the column of the line where it is."""
    return f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else str(error)


def _refuse_constant(name: str) -> Any:
    """Raises ValueError. The JSON decoder calls it for NaN, Infinity and -Infinity; `name` is one of these."""
    raise ValueError(f"{name} is not a number in JSON")


def _parse_float(digits: str) -> float:
    """Returns the value of a JSON number with a point or exponent. Raises ValueError if it is too large for a float."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:20]} is too large")
    return value


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object as a dict. Raises ValueError if a key occurs twice, because either value may be meant."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {ascii(twice)[:80]} occurs twice in one object")
    return made


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_parse_float, object_pairs_hook=_make_object)


def _parse_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError if it is not JSON, RecursionError if it is nested too deeply.

    Raises ValueError also for what Python's reader accepts and other programs cannot use: NaN, infinity, numbers too
    large for a float, an object with a key twice, and half a character (a lone surrogate).
    """
    value = _DECODER.decode(text)
    if has_half_character(text):
        raise ValueError("it contains half a character (a lone surrogate)")
    return value


def has_half_character(text: str) -> bool:
    """Returns whether a JSON text in ASCII has the escape of half a character: a surrogate without the other half.

    Such a text cannot be written as UTF-8.

    >>> has_half_character(json.dumps("\\ud83e")), has_half_character(json.dumps("\U0001f600"))
    (True, False)
    """
    # Decoding the text is slow, so only one that has the escape of a surrogate is decoded.
    if not _SURROGATE.search(text):
        return False
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
