"""Files with rows, by their names' endings: JSON Lines, JSON, CSV, Parquet."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cohort.errors import TaskError, brief

EXTRA = "pip install 'cohort[data]'"
MAX_CELL = 2**30  # characters in a cell of a CSV file; the csv module's own limit is shorter than a long solution
BATCH = 1000  # rows that Parquet files and hub data sets hand over at once
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

Raw = dict[str, Any]
Numbered = Iterator[tuple[int, Any]]
"""Raw rows with their numbers from 1: of the line in JSON Lines and CSV, of the row elsewhere."""


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
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    names: list[str] = []
    number = 1  # of the line where a row begins: its cells may have several
    try:
        for values in reader:
            if values and not names:
                names = values
                if len({*names}) < len(names):
                    raise TaskError(f"{path}: two columns have the same name in its first line, which holds the names")
            elif values:  # blank lines have no cells
                if len(values) != len(names):
                    raise TaskError(
                        f"{path}, line {number} has {len(values)} cells, but there are {len(names)} columns"
                    )
                yield number, dict(zip(names, values, strict=True))
            number = reader.line_num + 1
    except csv.Error as error:
        raise TaskError(f"{path}, line {number} is not CSV: {error}") from error


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
        raise TaskError(f"cannot read {path}: {brief(error)}") from error


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
