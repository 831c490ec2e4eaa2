"""The one serialisation of records: rollout files hold it, and it is all that passes between processes.

    data = dumps(groups)      # bytes
    groups = loads(data)      # equal records, number for number and bit for bit

A value is a tree of registered dataclasses and enums, lists, tuples, dicts with text keys, numpy arrays, text, numbers,
truth values and None. Lists of whole numbers or of floats are stored as arrays in the smallest type that loses nothing,
all arrays of one type end to end; everything else is JSON, deflated. The bytes are a safetensors file. Nothing is ever
executed on reading: a class is looked up by its name among the registered ones, and unknown names are refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from cohort import types
from cohort.fates import Fate

FORMAT = 1
Array = NDArray[Any]
C = TypeVar("C", bound=type)

# How a value that JSON does not have is marked: the first entry of a list. Plain lists are marked, too.
_LIST, _TUPLE, _RECORD, _ENUM, _NUMBERS, _ARRAY, _DICT = "l", "t", "r", "e", "n", "a", "d"
_STORES = ("uint8", "int32", "int64", "float32", "float64")  # where lists of numbers lie
_records: dict[str, type] = {}


class SerialError(ValueError):
    """A value that has no serialisation, or bytes that are none."""


def record(cls: C) -> C:
    """Register a dataclass or enum under its own name, so that it can travel. A decorator, or a plain call."""
    if not (dataclasses.is_dataclass(cls) or issubclass(cls, Enum) or hasattr(cls, "_fields")):
        raise TypeError(f"{cls.__name__} is neither a dataclass, nor an enum, nor a named tuple")
    if _records.setdefault(cls.__name__, cls) is not cls:
        raise TypeError(f"two records are called {cls.__name__}")
    return cls


def dumps(value: Any) -> bytes:
    """The value as bytes. Raises SerialError for what cannot travel, naming its type."""
    writer = _Writer()
    tree = writer.encode(value)
    arrays = writer.arrays()
    header = {"format": FORMAT, "fields": writer.fields, "value": tree}
    text = json.dumps(header, separators=(",", ":")).encode()
    arrays["json"] = np.frombuffer(zlib.compress(text, 6), dtype=np.uint8)
    return save(arrays)


def loads(data: bytes) -> Any:
    """The value that `dumps` was given. Raises SerialError for bytes that are not such."""
    try:
        arrays = load(data)
        header = json.loads(zlib.decompress(arrays["json"].tobytes()))
        if header["format"] > FORMAT:
            raise SerialError(f"its format is {header['format']}, this version of Cohort knows {FORMAT}")
        return _Reader(arrays, header["fields"]).decode(header["value"])
    except SerialError:
        raise
    except (SafetensorError, zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise SerialError(str(error)) from error


class _Writer:
    """Takes the numbers out of a tree. What is left is JSON."""

    def __init__(self) -> None:
        self._stores: dict[str, list[Array]] = {}  # by type: numbers end to end
        self._filled: dict[str, int] = {}
        self.fields: dict[str, list[str]] = {}  # of every class in the tree, in the order their values are written

    def encode(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            numbers = _as_numbers(value)
            if numbers is None:
                return [_LIST, *map(self.encode, value)]
            return [_NUMBERS, _STORES.index(numbers.dtype.name), self._stored(numbers), len(numbers)]
        if isinstance(value, Enum):
            return [_ENUM, _name_of(value), value.value]
        if type(value) is tuple:
            return [_TUPLE, *map(self.encode, value)]
        if type(value) is dict:
            if not all(type(key) is str for key in value):
                raise SerialError("a dict with keys that are not text cannot be serialised")
            return [_DICT, {key: self.encode(item) for key, item in value.items()}]
        if isinstance(value, np.ndarray):
            return [_ARRAY, value.dtype.name, self._stored(value.reshape(-1)), list(value.shape)]
        name = _name_of(value)
        names = self.fields.setdefault(name, field_names(type(value)))
        return [_RECORD, name, *(self.encode(getattr(value, field)) for field in names)]

    def _stored(self, numbers: Array) -> int:
        """Where in the store of its type these numbers begin."""
        store = numbers.dtype.name
        self._stores.setdefault(store, []).append(numbers)
        start = self._filled.get(store, 0)
        self._filled[store] = start + len(numbers)
        return start

    def arrays(self) -> dict[str, Array]:
        return {name: np.concatenate(parts) for name, parts in self._stores.items()}


class _Reader:
    def __init__(self, arrays: dict[str, Array], fields: dict[str, list[str]]) -> None:
        self._fields = fields
        self._arrays = arrays
        self._lists: dict[str, list[Any]] = {}  # the stores as Python numbers, where lists lie in them
        self._decoders: dict[str, Callable[[list[Any]], Any]] = {
            _LIST: lambda parts: [self.decode(p) for p in parts],
            _TUPLE: lambda parts: tuple(self.decode(p) for p in parts),
            _DICT: lambda parts: {key: self.decode(item) for key, item in parts[0].items()},
            _ENUM: lambda parts: _class_of(parts[0])(parts[1]),
            _RECORD: self._record,
            _NUMBERS: self._numbers,
            _ARRAY: self._array,
        }

    def decode(self, tree: Any) -> Any:
        if not isinstance(tree, list):
            return tree
        kind, *parts = tree
        return self._decoders[kind](parts)

    def _record(self, parts: list[Any]) -> Any:
        """By the names that the writer's class had: a field that was added since takes its default."""
        name, *values = parts
        named = zip(self._fields[name], values, strict=True)
        return _class_of(name)(**{field: self.decode(value) for field, value in named})

    def _numbers(self, parts: list[Any]) -> list[Any]:
        index, start, num = parts
        store = _STORES[index]
        if store not in self._lists:
            self._lists[store] = self._arrays[store].tolist()
        found: list[Any] = self._lists[store][start : start + num]
        if len(found) != num:
            raise SerialError("an array is shorter than its lengths say")
        return found

    def _array(self, parts: list[Any]) -> Array:
        """Its own copy: whoever gets it may write into it."""
        store, start, shape = parts
        return self._arrays[store][start : start + math.prod(shape)].reshape(shape).copy()


def _as_numbers(values: list[Any]) -> Array | None:
    """A list of whole numbers, or of floats, in the smallest type that loses nothing; None = it is another list."""
    kinds = set(map(type, values))
    if kinds == {float}:
        exact = np.array(values, dtype=np.float64)
        with np.errstate(over="ignore"):
            narrow = exact.astype(np.float32)
        # bits, not values: NaN must compare equal and -0.0 must not become 0.0
        same = np.array_equal(narrow.astype(np.float64).view(np.int64), exact.view(np.int64))
        return narrow if same else exact
    if not kinds or not all(issubclass(kind, int) and kind is not bool for kind in kinds):
        return None
    if any(issubclass(kind, Enum) for kind in kinds):
        values = [int(value) for value in values]  # a provenance is its number
    low, high = min(values), max(values)
    if not -(2**63) <= low <= high < 2**63:
        return None
    dtype = "uint8" if low >= 0 and high < 256 else "int32" if low >= -(2**31) and high < 2**31 else "int64"
    return np.array(values, dtype=dtype)


def field_names(cls: type) -> list[str]:
    """Of a dataclass or named tuple."""
    return list(cls._fields) if hasattr(cls, "_fields") else [f.name for f in dataclasses.fields(cls)]


def _name_of(value: Any) -> str:
    name = type(value).__name__
    if _records.get(name) is not type(value):
        raise SerialError(f"a {name} cannot be serialised: it is no plain value and no registered record")
    return name


def _class_of(name: str) -> Any:
    if name not in _records:
        raise SerialError(f'there is no record "{name}"')
    return _records[name]


for _cls in (types.SampleId, types.Key, types.Sampling, types.Prompt, types.Sample, types.Group, types.Finish, Fate):
    record(_cls)
