"""Serialisation of records to bytes. Rollout files hold these bytes, and processes exchange nothing else.

    data = dumps(groups)      # bytes
    groups = loads(data)      # equal records, number for number and bit for bit

A value is a tree of registered dataclasses and enums, lists, tuples, dicts with text keys, numpy arrays, text, numbers,
truth values and None. Lists of whole numbers or of floats are stored as arrays, in the smallest type that loses
nothing. All arrays of one type are joined end to end. Everything else is compressed JSON. The bytes are a safetensors
file, with a checksum in its header. Reading never executes anything: a class is looked up by its name among the
registered ones, and unknown names are refused. Damaged or hostile bytes are refused with a clear message, before they
take much more memory than their length.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
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

# Every value that JSON does not have becomes a JSON list whose first entry is one of these marks. Plain lists are
# marked too, so that they cannot be mistaken for another kind.
_LIST = "l"
_TUPLE = "t"
_RECORD = "r"
_ENUM = "e"
_NUMBERS = "n"
_ARRAY = "a"
_DICT = "d"
# Types in which lists of numbers are stored. The index is part of the format: entries keep their places.
_STORES = ("uint8", "int32", "int64", "float32", "float64")
# Writer and reader refuse values with more levels, so that everything that was written can be read.
_MAX_DEPTH = 100
# The CRC-32 of all bytes is in the safetensors header, as text. It is computed with zeros in its place.
_CHECKSUM = "crc32"
_NO_CHECKSUM = "00000000"
_CHECKSUM_PLACE = re.compile(rb'"__metadata__":\{"crc32":"([0-9a-f]{8})"\}')
_records: dict[str, type] = {}


class SerialError(ValueError):
    """A value that cannot be serialised, or bytes that `dumps` did not write."""


def record(cls: C) -> C:
    """Registers a dataclass, enum or named tuple under its class name, so that it can be serialised.

    Returns the class, so it works as a decorator and as a plain call. Raises TypeError for other classes and for a
    second class of the same name.
    """
    if not (dataclasses.is_dataclass(cls) or issubclass(cls, Enum) or hasattr(cls, "_fields")):
        raise TypeError(f"{cls.__name__} cannot be a record: it is no dataclass, no enum and no named tuple")
    if _records.setdefault(cls.__name__, cls) is not cls:
        raise TypeError(f"two records are called {cls.__name__}; rename one of the classes")
    return cls


def dumps(value: Any) -> bytes:
    """Returns the value as bytes that `loads` can read. Raises SerialError if a part of it cannot be serialised."""
    writer = _Writer()
    try:
        tree = writer.encode(value)
        arrays = writer.join_stores()
        header = {"format": FORMAT, "fields": writer.fields, "value": tree}
        text = json.dumps(header, separators=(",", ":")).encode()
        arrays["json"] = np.frombuffer(_deflate(text, sum(a.nbytes for a in arrays.values())), dtype=np.uint8)
        return _seal(save(arrays, {_CHECKSUM: _NO_CHECKSUM}))
    except SerialError:
        raise
    except RecursionError:
        raise SerialError("the value is nested too deep") from None
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise SerialError(f"the value cannot be serialised: {error}") from error


def loads(data: bytes) -> Any:
    """Returns a value equal to the one that `dumps` turned into these bytes.

    Raises SerialError for bytes that are damaged, not from `dumps`, of a newer format, or with records that this
    version of Cohort does not have. Bytes of earlier versions have no checksum, so some damage to them is not seen.
    """
    try:
        _check_seal(data)
        arrays = load(data)
        if "json" not in arrays:
            raise SerialError("the data lacks its JSON header")
        header = json.loads(inflate(arrays["json"].tobytes(), len(data)))
        if not isinstance(header, dict) or not header.keys() >= {"format", "fields", "value"}:
            raise SerialError('the JSON header is incomplete: it must have "format", "fields" and "value"')
        if type(header["format"]) is not int or header["format"] < 1:
            raise SerialError("the format is not a whole number of at least 1")
        if header["format"] > FORMAT:
            raise SerialError(
                f"the format is {header['format']}, and this version of Cohort reads formats up to {FORMAT}; "
                "use a newer version"
            )
        return _Reader(arrays, header["fields"]).decode(header["value"])
    except SerialError:
        raise
    except RecursionError:
        raise SerialError("the data is nested too deep") from None
    except MemoryError:
        raise SerialError("the data claims a size that does not fit into memory") from None
    except (SafetensorError, zlib.error, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SerialError(f"the bytes are damaged ({error})") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise SerialError(f"the data makes no sense ({type(error).__name__}: {error})") from error


def _seal(data: bytes) -> bytes:
    """Returns the bytes of a safetensors file with their CRC-32 in the place that `save` has left for it."""
    blank = _find_checksum(data)
    assert blank is not None
    return data[: blank.start(1)] + f"{zlib.crc32(data):08x}".encode() + data[blank.end(1) :]


def _check_seal(data: bytes) -> None:
    """Raises SerialError if bytes from `dumps` have changed since. Earlier versions wrote no checksum."""
    found = _find_checksum(data)
    if found is None:
        if b'"__metadata__"' in data[: _find_header_end(data)]:
            raise SerialError("the bytes are damaged (the checksum cannot be read)")
        return
    # In three pieces, because a copy of the bytes could be large.
    value = zlib.crc32(data[: found.start(1)])
    value = zlib.crc32(memoryview(data)[found.end(1) :], zlib.crc32(_NO_CHECKSUM.encode(), value))
    if found[1] != f"{value:08x}".encode():
        raise SerialError("the bytes have changed since they were written: their checksum is another one")


def _find_checksum(data: bytes) -> re.Match[bytes] | None:
    """Returns where the header of a safetensors file has the checksum, as group 1; None if it has none."""
    return _CHECKSUM_PLACE.search(data, 8, _find_header_end(data))


def _find_header_end(data: bytes) -> int:
    """Returns where the header of a safetensors file ends, which is JSON: its first eight bytes are the length."""
    return min(len(data), 8 + int.from_bytes(data[:8], "little"))


def inflate(packed: bytes, size: int) -> bytes:
    """Returns the decompressed text of `packed` (zlib format), which comes from a file of `size` bytes.

    Raises SerialError where the text is cut off or is longer than a file of that size may hold (16 MiB + 32 x `size`),
    and zlib.error for other damage.
    """
    most = _max_text_bytes(size)
    inflater = zlib.decompressobj()
    # One byte more than allowed tells a text of just the right length from a longer one.
    text = inflater.decompress(packed, most + 1)
    if len(text) > most:
        raise SerialError(f"the compressed text inflates to more than {most} bytes, the most for data of this size")
    if not inflater.eof:
        raise SerialError("the compressed text is cut off")
    return text


def _deflate(text: bytes, num_array_bytes: int) -> bytes:
    """Returns the text in zlib's format. `num_array_bytes` is the size of all arrays in the same file.

    Text that compresses so well that `inflate` would refuse it is stored in that format without compression.
    """
    packed = zlib.compress(text, 6)
    return packed if len(text) <= _max_text_bytes(num_array_bytes + len(packed)) else zlib.compress(text, 0)


def _max_text_bytes(size: int) -> int:
    """Returns how many bytes of text a file of `size` bytes may hold.

    Deflate alone would allow a thousandfold, and a policy that repeats one word comes near that. But each of its tokens
    takes 9 bytes or more as numbers in the same file. So rollouts never have 32 times as much text as the whole file
    has bytes, and the memory that a file takes is bounded by its size. The constant is for small files with large rows.
    """
    return 16 * 2**20 + 32 * size


class _Writer:
    """Encoder that moves the numbers of a value into arrays, by type. The remaining tree is JSON."""

    def __init__(self) -> None:
        self._stores: dict[str, list[Array]] = {}  # by type: arrays, to be joined end to end
        self._filled: dict[str, int] = {}  # by type: how many numbers are in the store
        self._depth = 0
        self.fields: dict[str, list[str]] = {}  # per class in the tree: field names, in the order of the values

    def encode(self, value: Any) -> Any:
        """Returns the value as a tree for JSON, with references to a store in place of lists of numbers and of arrays.

        The numbers themselves are added to the stores. None, truth values, numbers and text are returned unchanged.
        Raises SerialError for a value of unknown type or with too many levels.
        """
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            numbers = _to_number_array(value)
            if numbers is not None:
                return [
                    _NUMBERS,
                    _STORES.index(_dtype_name(numbers.dtype)),
                    self._append_to_store(numbers),
                    len(numbers),
                ]
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise SerialError(f"the value is nested too deep: it has more than {_MAX_DEPTH} levels")
        tree = self._encode_container(value)
        self._depth -= 1
        return tree

    def _encode_container(self, value: Any) -> list[Any]:
        """Returns a list [mark, ...] for JSON that represents a list, tuple, dict, array, enum member or record.

        Numbers of arrays are added to the stores. Raises SerialError for anything else, for dict keys that are not
        text, and for enums and records whose class is not registered.
        """
        if type(value) is list:
            return [_LIST, *map(self.encode, value)]
        if isinstance(value, Enum):
            return [_ENUM, _find_record_name(value), value.value]
        # The exact type is compared: a registered named tuple is a record, not a tuple.
        if type(value) is tuple:
            return [_TUPLE, *map(self.encode, value)]
        if type(value) is dict:
            if not all(type(key) is str for key in value):
                raise SerialError("a dict with keys that are not text cannot be serialised")
            return [_DICT, {key: self.encode(item) for key, item in value.items()}]
        if isinstance(value, np.ndarray):
            return [_ARRAY, _dtype_name(value.dtype), self._append_to_store(value.reshape(-1)), list(value.shape)]
        name = _find_record_name(value)
        names = self.fields.setdefault(name, field_names(type(value)))
        return [_RECORD, name, *(self.encode(getattr(value, field)) for field in names)]

    def _append_to_store(self, numbers: Array) -> int:
        """Adds the numbers to the end of the store of their type. Returns the index of the first one in that store."""
        store = _dtype_name(numbers.dtype)
        self._stores.setdefault(store, []).append(numbers)
        start = self._filled.get(store, 0)
        self._filled[store] = start + len(numbers)
        return start

    def join_stores(self) -> dict[str, Array]:
        """Returns one array per number type, by name of the type, with all stored numbers of that type end to end."""
        return {name: np.concatenate(parts) for name, parts in self._stores.items()}


class _Reader:
    """Decoder that puts the numbers back into the tree.

    It checks everything that it reads, because the bytes may come from a damaged or hostile file.
    """

    def __init__(self, arrays: dict[str, Array], fields: dict[str, list[str]]) -> None:
        if not isinstance(fields, dict) or not all(isinstance(names, list) for names in fields.values()):
            raise SerialError("the data does not say which fields its records have")
        self._fields = fields
        self._arrays = arrays
        self._depth = 0
        self._handed_out: dict[str, int] = {}  # per store: how many of its numbers were returned so far
        self._lists: dict[str, list[Any]] = {}  # stores converted to Python numbers, once a list in them is read
        self._decoders: dict[str, Callable[[list[Any]], Any]] = {
            _LIST: lambda parts: [self.decode(p) for p in parts],
            _TUPLE: lambda parts: tuple(self.decode(p) for p in parts),
            _DICT: self._decode_dict,
            _ENUM: self._decode_enum,
            _RECORD: self._decode_record,
            _NUMBERS: self._decode_numbers,
            _ARRAY: self._decode_array,
        }

    def decode(self, tree: Any) -> Any:
        """Returns the value of a JSON tree that `_Writer.encode` made.

        Of other trees, most raise a SerialError, some a ValueError, TypeError or LookupError, which `loads` turns into
        a SerialError, and some give a record with values of the wrong types, which the reader of a file must check.
        """
        if not isinstance(tree, list):
            if isinstance(tree, dict):
                raise SerialError("an entry has no mark that says what it is")
            return tree
        if not tree or not isinstance(tree[0], str) or tree[0] not in self._decoders:
            raise SerialError("an entry has no mark that says what it is")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise SerialError(f"the data is nested too deep: it has more than {_MAX_DEPTH} levels")
        value = self._decoders[tree[0]](tree[1:])
        self._depth -= 1
        return value

    def _decode_dict(self, parts: list[Any]) -> dict[str, Any]:
        """Returns the dict in a marked list. `parts`, without the mark, must be one JSON object: else SerialError."""
        if len(parts) != 1 or not isinstance(parts[0], dict):
            raise SerialError("an entry that is marked as a dict holds something else")
        return {key: self.decode(item) for key, item in parts[0].items()}

    def _decode_enum(self, parts: list[Any]) -> Enum:
        """Returns the enum member that a marked list names. `parts` is [class name, the member's value].

        Raises SerialError if no enum is registered under that name, and ValueError if the enum has no such member.
        """
        name, value = parts
        cls = _find_record_class(name)
        if not issubclass(cls, Enum):
            raise SerialError(f'the record "{name}" is not an enum')
        return cls(value)

    def _decode_record(self, parts: list[Any]) -> Any:
        """Returns the record that a marked list describes. `parts` is [class name, value of each field, ...].

        Values are matched to the field names that the writer listed: a field that was added to the class since takes
        its default. Raises SerialError for an unknown class or a wrong number of values, and TypeError where the class
        has no such field or a missing field has no default.
        """
        name, *values = parts
        cls = _find_record_class(name)
        if issubclass(cls, Enum) or name not in self._fields or len(self._fields[name]) != len(values):
            raise SerialError(f'a record "{name}" does not have the fields that the data lists for it')
        named = zip(self._fields[name], values, strict=True)
        return cls(**{field: self.decode(value) for field, value in named})

    def _decode_numbers(self, parts: list[Any]) -> list[Any]:
        """Returns a list of Python numbers from a store. `parts` is [index of the type in `_STORES`, start, length].

        Raises SerialError if the store does not have these numbers.
        """
        index, start, num = parts
        if type(index) is not int or not 0 <= index < len(_STORES):
            raise SerialError("a list of numbers has an unknown type")
        store = _STORES[index]
        span = self._claim_span(store, start, num)
        # The store is converted to Python numbers once, when the first list in it is read.
        if store not in self._lists:
            self._lists[store] = self._arrays[store].tolist()
        return self._lists[store][span]

    def _decode_array(self, parts: list[Any]) -> Array:
        """Returns an array from a store, as a copy. `parts` is [name of its type, index of the first number, shape].

        Raises SerialError if the shape is invalid or the store does not have these numbers.
        """
        store, start, shape = parts
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise SerialError("an array has an invalid shape")
        return self._arrays[store][self._claim_span(store, start, math.prod(shape))].reshape(shape).copy()

    def _claim_span(self, store: str, start: Any, num: Any) -> slice:
        """Returns the slice of a store with `num` numbers from index `start`, and counts these numbers as handed out.

        Raises SerialError where the store does not have them, or where more numbers are handed out than it holds: a
        writer never refers to a number twice, and hostile data must not fill the memory.
        """
        if store == "json" or store not in self._arrays:
            raise SerialError("an entry refers to numbers that the data does not hold")
        if type(start) is not int or type(num) is not int or start < 0 or num < 0:
            raise SerialError("an entry refers to numbers at an invalid place")
        held = len(self._arrays[store])
        before = self._handed_out.get(store, 0)
        if start + num > held:
            raise SerialError("an array is shorter than its entries say")
        if before + num > held:
            raise SerialError("entries refer to the same numbers more than once")
        self._handed_out[store] = before + num
        return slice(start, start + num)


def _to_number_array(values: list[Any]) -> Array | None:
    """Returns a list of whole numbers, or of floats, as an array in the smallest type of `_STORES` that loses nothing.

    Members of an IntEnum count as whole numbers. Returns None for any other list: empty, mixed, with other values such
    as truth values, or with whole numbers beyond 64 bits.
    """
    if not values:
        return None
    # np.array would also take [1, 2.5] and [True, 2], and change their entries. So the types are checked first.
    kind = type(values[0])
    kinds = list(map(type, values))
    if kind is float and kinds.count(float) == len(kinds):
        exact = np.fromiter(values, np.float64, count=len(values))
        with np.errstate(over="ignore"):
            narrow = exact.astype(np.float32)
        # Bits are compared, not values: NaN must compare equal and -0.0 must not become 0.0.
        same = (narrow.astype(np.float64).view(np.int64) == exact.view(np.int64)).all()
        return narrow if same else exact
    # Members of an IntEnum such as Provenance count as whole numbers; truth values do not.
    if kinds.count(int) != len(kinds) and not all(issubclass(k, int) and k is not bool for k in set(kinds)):
        return None
    try:
        whole = np.fromiter(values, np.int64, count=len(values))
    except OverflowError:
        return None
    low, high = whole.min(), whole.max()
    dtype = np.uint8 if low >= 0 and high < 256 else np.int32 if low >= -(2**31) and high < 2**31 else np.int64
    return whole.astype(dtype, copy=False)


@cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    """Returns `dtype.name`, such as "float32". The cache saves time: numpy builds that name anew at every access."""
    return dtype.name


def field_names(cls: type) -> list[str]:
    """Returns the field names of a dataclass or named tuple, in order of definition. Other classes: TypeError.

    Fields whose metadata says `"stored": False` are left out: they get their default value when they are read.
    """
    if hasattr(cls, "_fields"):
        return list(cls._fields)
    return [f.name for f in dataclasses.fields(cls) if f.metadata.get("stored", True)]


def _find_record_name(value: Any) -> str:
    """Returns the name under which the class of `value` is registered. Raises SerialError if it is not."""
    name = type(value).__name__
    if _records.get(name) is not type(value):
        raise SerialError(f"a {name} cannot be serialised: it is neither a plain value nor a registered record")
    return name


def _find_record_class(name: Any) -> Any:
    """Returns the class that is registered under `name`. Raises SerialError if there is none."""
    if not isinstance(name, str) or name not in _records:
        raise SerialError(f'there is no record "{name}" in this version of Cohort')
    return _records[name]


for _cls in (types.SampleId, types.Key, types.Sampling, types.Prompt, types.Sample, types.Group, types.Finish, Fate):
    record(_cls)
