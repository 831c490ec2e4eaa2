"""Reading of JSON that others wrote: what cannot be read is a ValueError, whatever is wrong with it."""

from __future__ import annotations

import dataclasses
import json
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_MAX_NUMBER = 1 << 63
MAX_BYTES = 1 << 29  # of a file; the largest tokenizers have a tenth of it


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError if it is not JSON, not UTF-8, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_file(file: Path) -> Any:
    """Returns the value of a JSON file.

    Raises ValueError as `parse_json` does, and for what is not a regular file (a pipe would never end) or is larger
    than 512 MiB. Raises OSError if the file cannot be read.
    """
    about = file.stat()
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is not a file")
    if about.st_size > MAX_BYTES:
        raise ValueError(f"it has {about.st_size} bytes, more than {MAX_BYTES}")
    return parse_json(file.read_bytes())


def show_value(value: Any) -> str:
    """Returns a value of a JSON text as text for a message, cut after 60 characters.

    >>> show_value({"a": None}), len(show_value(10**400))
    ("{'a': None}", 63)
    """
    try:
        text = repr(value)
    # Numbers of too many digits and lists of too many levels have no text.
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}..."


def make_record(kind: Any, value: Any, place: str = "") -> Any:
    """Returns a JSON value as what the type `kind` says: a dataclass, or a value of a plain type that may contain some.

    Known types are dataclasses, str, bool, int, float, None, Any, unions, and lists and dicts of them. `place` names
    the value in messages. Raises ValueError for a value of another type, for a missing or unknown field, and for a
    number that is too large.

    >>> make_record(list[int | None], [1, None])
    [1, None]
    """
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _make_dataclass(kind, value, place)
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        # The types of a union are plain ones here, so the first that fits is the right one.
        for part in parts:
            with suppress(ValueError):
                return make_record(part, value, place)
    elif origin is list and isinstance(value, list):
        return [make_record(parts[0], item, f"{place}[{i}]") for i, item in enumerate(value)]
    elif origin is dict and isinstance(value, dict):
        return {key: make_record(parts[1], item, f"{place}.{key}") for key, item in value.items()}
    elif type(value) is kind or value is kind or (kind is NoneType and value is None):
        if not isinstance(value, int) or -_MAX_NUMBER < value < _MAX_NUMBER:
            return value
    elif kind is float and type(value) is int and -_MAX_NUMBER < value < _MAX_NUMBER:
        return value
    raise ValueError(f"{place or 'the value'} is {show_value(value)}, not {getattr(kind, '__name__', kind)}")


def _make_dataclass(kind: Any, value: Any, place: str) -> Any:
    """Returns a JSON object as an instance of the dataclass `kind`. Raises ValueError as `make_record` does."""
    if not isinstance(value, dict):
        raise ValueError(f"{place or 'the value'} is {show_value(value)}, not an object")
    types = _list_field_types(kind)
    if unknown := value.keys() - types.keys():
        raise ValueError(f"{place or 'the object'} has the unknown field {show_value(min(unknown))}")
    prefix = f"{place}." if place else ""
    fields = {name: make_record(types[name], item, prefix + name) for name, item in value.items()}
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{place or 'the object'}: {error}") from error


@cache
def _list_field_types(kind: Any) -> dict[str, Any]:
    """Returns the types of the fields of a dataclass by name."""
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in dataclasses.fields(kind)}
