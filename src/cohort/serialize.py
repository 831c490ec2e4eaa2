"""The one serialisation of records: rollout files hold it, and it is all that passes between processes.

    data = dumps(groups)      # bytes
    groups = loads(data)      # equal records, number for number and bit for bit

A value is a tree of registered dataclasses and enums, lists, tuples, dicts with text keys, numpy arrays, text, numbers,
truth values and None. Lists of whole numbers or of floats are stored as arrays in the smallest type that loses nothing,
all arrays of one type end to end; everything else is JSON, deflated. The bytes are a safetensors file. Nothing is ever
executed on reading: a class is looked up by its name among the registered ones, and unknown names are refused. Damaged
or hostile bytes are refused with a sentence, before they take much more memory than they are long.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Callable
from enum import Enum
from functools import cache
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
_MAX_DEPTH = 100  # levels of a value: both sides refuse more, so that what was written can be read
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
    try:
        tree = writer.encode(value)
        arrays = writer.arrays()
        header = {"format": FORMAT, "fields": writer.fields, "value": tree}
        text = json.dumps(header, separators=(",", ":")).encode()
        arrays["json"] = np.frombuffer(_deflate(text, sum(a.nbytes for a in arrays.values())), dtype=np.uint8)
        return save(arrays)
    except SerialError:
        raise
    except RecursionError:
        raise SerialError("it is nested too deep") from None
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SerialError(f"it cannot be serialised: {error}") from error


def loads(data: bytes) -> Any:
    """The value that `dumps` was given. Raises SerialError for bytes that are not such."""
    try:
        arrays = load(data)
        if "json" not in arrays:
            raise SerialError("it lacks the part that says what it holds")
        header = json.loads(inflate(arrays["json"].tobytes(), len(data)))
        if not isinstance(header, dict) or not header.keys() >= {"format", "fields", "value"}:
            raise SerialError("what says what it holds is incomplete")
        if type(header["format"]) is not int or header["format"] < 1:
            raise SerialError("its format is no number of a format")
        if header["format"] > FORMAT:
            raise SerialError(f"its format is {header['format']}, this version of Cohort knows {FORMAT}")
        return _Reader(arrays, header["fields"]).decode(header["value"])
    except SerialError:
        raise
    except RecursionError:
        raise SerialError("it is nested too deep") from None
    except MemoryError:
        raise SerialError("what it claims to hold does not fit into memory") from None
    except (SafetensorError, zlib.error, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SerialError(f"its bytes are damaged ({error})") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise SerialError(f"what it holds makes no sense ({type(error).__name__}: {error})") from error


def inflate(packed: bytes, size: int) -> bytes:
    """The deflated text of a file of `size` bytes. Raises SerialError for more text than such a file may have."""
    most = _most_text(size)
    inflater = zlib.decompressobj()
    text = inflater.decompress(packed, most + 1)
    if len(text) > most:
        raise SerialError(f"its text inflates to more than {most} bytes, which is too much for its size")
    if not inflater.eof:
        raise SerialError("its text is cut off")
    return text


def _deflate(text: bytes, num_beside: int) -> bytes:
    """Packed, beside so many bytes of numbers. Text that `inflate` would refuse is only wrapped, not made smaller."""
    packed = zlib.compress(text, 6)
    return packed if len(text) <= _most_text(num_beside + len(packed)) else zlib.compress(text, 0)


def _most_text(size: int) -> int:
    """How much text a file of that size may have, in bytes.

    Deflate alone would allow a thousandfold, and a policy that repeats one word comes near that. But each of its tokens
    takes 9 bytes or more as numbers in the same file. So 32 times the whole file is more than rollouts have, and what a
    file takes in memory is bounded by its size. The constant is for small files with large rows.
    """
    return 16 * 2**20 + 32 * size


class _Writer:
    """Takes the numbers out of a tree. What is left is JSON."""

    def __init__(self) -> None:
        self._stores: dict[str, list[Array]] = {}  # by type: numbers end to end
        self._filled: dict[str, int] = {}
        self._depth = 0
        self.fields: dict[str, list[str]] = {}  # of every class in the tree, in the order their values are written

    def encode(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            numbers = _as_numbers(value)
            if numbers is not None:
                return [_NUMBERS, _STORES.index(_dtype_name(numbers.dtype)), self._stored(numbers), len(numbers)]
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise SerialError(f"it is nested too deep: more than {_MAX_DEPTH} levels")
        tree = self._container(value)
        self._depth -= 1
        return tree

    def _container(self, value: Any) -> list[Any]:
        """A value that has parts, or is an array or an enum's."""
        if type(value) is list:
            return [_LIST, *map(self.encode, value)]
        if isinstance(value, Enum):
            return [_ENUM, _name_of(value), value.value]
        if type(value) is tuple:
            return [_TUPLE, *map(self.encode, value)]
        if type(value) is dict:
            if not all(type(key) is str for key in value):
                raise SerialError("a dict with keys that are not text cannot be serialised")
            return [_DICT, {key: self.encode(item) for key, item in value.items()}]
        if isinstance(value, np.ndarray):
            return [_ARRAY, _dtype_name(value.dtype), self._stored(value.reshape(-1)), list(value.shape)]
        name = _name_of(value)
        names = self.fields.setdefault(name, field_names(type(value)))
        return [_RECORD, name, *(self.encode(getattr(value, field)) for field in names)]

    def _stored(self, numbers: Array) -> int:
        """Where in the store of its type these numbers begin."""
        store = _dtype_name(numbers.dtype)
        self._stores.setdefault(store, []).append(numbers)
        start = self._filled.get(store, 0)
        self._filled[store] = start + len(numbers)
        return start

    def arrays(self) -> dict[str, Array]:
        return {name: np.concatenate(parts) for name, parts in self._stores.items()}


class _Reader:
    """Puts the numbers back. It believes nothing: bytes may come from a damaged or a hostile file."""

    def __init__(self, arrays: dict[str, Array], fields: dict[str, list[str]]) -> None:
        if not isinstance(fields, dict) or not all(isinstance(names, list) for names in fields.values()):
            raise SerialError("it does not say which fields its records have")
        self._fields = fields
        self._arrays = arrays
        self._depth = 0
        self._handed_out: dict[str, int] = {}  # by store: how many of its numbers
        self._lists: dict[str, list[Any]] = {}  # the stores as Python numbers, where lists lie in them
        self._decoders: dict[str, Callable[[list[Any]], Any]] = {
            _LIST: lambda parts: [self.decode(p) for p in parts],
            _TUPLE: lambda parts: tuple(self.decode(p) for p in parts),
            _DICT: self._dict,
            _ENUM: self._enum,
            _RECORD: self._record,
            _NUMBERS: self._numbers,
            _ARRAY: self._array,
        }

    def decode(self, tree: Any) -> Any:
        if not isinstance(tree, list):
            if isinstance(tree, dict):
                raise SerialError("an entry has no mark that says what it is")
            return tree
        if not tree or not isinstance(tree[0], str) or tree[0] not in self._decoders:
            raise SerialError("an entry has no mark that says what it is")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise SerialError(f"it is nested too deep: more than {_MAX_DEPTH} levels")
        value = self._decoders[tree[0]](tree[1:])
        self._depth -= 1
        return value

    def _dict(self, parts: list[Any]) -> dict[str, Any]:
        if len(parts) != 1 or not isinstance(parts[0], dict):
            raise SerialError("an entry that is marked as a dict is none")
        return {key: self.decode(item) for key, item in parts[0].items()}

    def _enum(self, parts: list[Any]) -> Enum:
        name, value = parts
        cls = _class_of(name)
        if not issubclass(cls, Enum):
            raise SerialError(f'the record "{name}" is no enum')
        return cls(value)

    def _record(self, parts: list[Any]) -> Any:
        """By the names that the writer's class had: a field that was added since takes its default."""
        name, *values = parts
        cls = _class_of(name)
        if issubclass(cls, Enum) or name not in self._fields or len(self._fields[name]) != len(values):
            raise SerialError(f'a record "{name}" has not the fields that it should have')
        named = zip(self._fields[name], values, strict=True)
        return cls(**{field: self.decode(value) for field, value in named})

    def _numbers(self, parts: list[Any]) -> list[Any]:
        index, start, num = parts
        if type(index) is not int or not 0 <= index < len(_STORES):
            raise SerialError("a list of numbers has no known type")
        store = _STORES[index]
        span = self._span(store, start, num)
        if store not in self._lists:
            self._lists[store] = self._arrays[store].tolist()
        return self._lists[store][span]

    def _array(self, parts: list[Any]) -> Array:
        """Its own copy: whoever gets it may write into it."""
        store, start, shape = parts
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise SerialError("an array has a shape that is none")
        return self._arrays[store][self._span(store, start, math.prod(shape))].reshape(shape).copy()

    def _span(self, store: str, start: Any, num: Any) -> slice:
        """Where numbers lie. A writer refers to no place twice, so no more is handed out than the store holds."""
        if store == "json" or store not in self._arrays:
            raise SerialError("it refers to numbers that it does not hold")
        if type(start) is not int or type(num) is not int or start < 0 or num < 0:
            raise SerialError("it refers to numbers at a place that is none")
        held, before = len(self._arrays[store]), self._handed_out.get(store, 0)
        if start + num > held:
            raise SerialError("an array is shorter than its lengths say")
        if before + num > held:
            raise SerialError("it refers to the same numbers more than once")
        self._handed_out[store] = before + num
        return slice(start, start + num)


def _as_numbers(values: list[Any]) -> Array | None:
    """A list of whole numbers, or of floats, in the smallest type that loses nothing; None = it is another list."""
    if not values:
        return None
    # np.array would take [1, 2.5] and [True, 2] as well and so change them: the types are looked at first
    kind, kinds = type(values[0]), list(map(type, values))
    if kind is float and kinds.count(float) == len(kinds):
        exact = np.fromiter(values, np.float64, count=len(values))
        with np.errstate(over="ignore"):
            narrow = exact.astype(np.float32)
        # bits, not values: NaN must compare equal and -0.0 must not become 0.0
        same = (narrow.astype(np.float64).view(np.int64) == exact.view(np.int64)).all()
        return narrow if same else exact
    if kinds.count(int) != len(kinds) and not all(issubclass(k, int) and k is not bool for k in set(kinds)):
        return None
    try:
        whole = np.fromiter(values, np.int64, count=len(values))  # a provenance is its number
    except OverflowError:
        return None
    low, high = whole.min(), whole.max()
    dtype = np.uint8 if low >= 0 and high < 256 else np.int32 if low >= -(2**31) and high < 2**31 else np.int64
    return whole.astype(dtype, copy=False)


@cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    """As `dtype.name`, which numpy puts together anew at every call."""
    return dtype.name


def field_names(cls: type) -> list[str]:
    """Of a dataclass or named tuple."""
    return list(cls._fields) if hasattr(cls, "_fields") else [f.name for f in dataclasses.fields(cls)]


def _name_of(value: Any) -> str:
    name = type(value).__name__
    if _records.get(name) is not type(value):
        raise SerialError(f"a {name} cannot be serialised: it is no plain value and no registered record")
    return name


def _class_of(name: Any) -> Any:
    if not isinstance(name, str) or name not in _records:
        raise SerialError(f'there is no record "{name}"')
    return _records[name]


for _cls in (types.SampleId, types.Key, types.Sampling, types.Prompt, types.Sample, types.Group, types.Finish, Fate):
    record(_cls)
