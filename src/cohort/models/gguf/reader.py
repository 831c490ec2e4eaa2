"""Reader for the header of a GGUF file: its metadata, and where each tensor lies. Uses only the standard library.

The file may be of unknown origin. Every count and length in it is compared with the bytes that are left before it is
used. So a truncated or malicious file raises a `ModelError` and never causes a huge allocation.
"""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cohort.errors import ModelError

# Types of values, by GGUF's numbers. All others are single numbers, listed with their codes for `struct`.
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MAX_DIMENSIONS = 4
MAX_HEADER_BYTES = 1 << 28  # the largest vocabularies take 20 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """What the header says about a tensor."""

    name: str
    shape: tuple[int, ...]  # rows first, as in torch
    format: int  # GGUF's number of the format in which it is packed
    offset: int  # first byte in the file

    @property
    def num_weights(self) -> int:
        """The number of entries of the tensor."""
        count = 1
        for side in self.shape:
            count *= side
        return count


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """Everything that precedes the weights in a GGUF file."""

    metadata: dict[str, Any]  # numbers, strings, lists of strings, arrays of numbers
    tensors: tuple[StoredTensor, ...]
    num_bytes: int  # of the whole file


def read_header(path: Path) -> GgufHeader:
    """Returns the header of a GGUF file: metadata and list of tensors, without reading the weights.

    Raises ModelError if the file cannot be read, is not GGUF of version 2 or 3, or has a damaged header.
    """
    try:
        with open(path, "rb") as file:
            return _HeaderReader(path, file).read_header()
    except FileNotFoundError as e:
        raise ModelError(f"{path} does not exist: give the path of a GGUF file") from e
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror or e}; give the path of a readable GGUF file") from e


class _HeaderReader:
    """Reads a GGUF file from its beginning. Each method reads the next item and moves on."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.left = self.size  # bytes that are not read yet

    def read_header(self) -> GgufHeader:
        """Reads and returns the whole header. The file must be at its beginning.

        Offsets of tensors in the result count from the start of the file. Raises ModelError if the file is not GGUF of
        version 2 or 3, or is damaged.
        """
        if self.left < 24 or self.read_bytes(4) != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file, or only its beginning: give a whole GGUF file")
        version = self.read_number("I")
        if version not in (2, 3):
            # The bytes of a small version number in the other order.
            swapped = " (of a big-endian machine)" if version and version & 0xFFFF == 0 else ""
            raise ModelError(
                f"{self.path} is GGUF version {version}{swapped}: only 2 and 3 (little-endian) are supported, "
                "choose another file"
            )
        num_tensors = self.read_number("Q")
        num_values = self.read_number("Q")
        # The least bytes that each takes. Checked now, so that no loop begins for counts that cannot be true.
        self.require_bytes(num_tensors * 24 + num_values * 13)
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            name = self.read_string()
            if name in metadata:
                raise self.make_error(f'"{name}" is there twice')
            metadata[name] = self.read_value(self.read_number("I"))
        listed = [self.read_tensor() for _ in range(num_tensors)]
        if len({t.name for t in listed}) < len(listed):
            raise self.make_error("two tensors have the same name")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.make_error(f"general.alignment is {alignment!r}, not a power of two")
        # The weights begin at the next multiple of the alignment. Offsets of tensors count from there.
        start = -(-(self.size - self.left) // alignment) * alignment
        tensors = (StoredTensor(name=t.name, shape=t.shape, format=t.format, offset=start + t.offset) for t in listed)
        return GgufHeader(metadata=metadata, tensors=tuple(tensors), num_bytes=self.size)

    def read_tensor(self) -> StoredTensor:
        """Reads and returns the next entry in the list of tensors.

        Its offset counts from the first weight, not yet from the file's start. Raises ModelError if the tensor is empty
        or does not have 1 to 4 dimensions.
        """
        name, num_dimensions = self.read_string(), self.read_number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.make_error(f'tensor "{name}" has {num_dimensions} dimensions')
        sides = [self.read_number("Q") for _ in range(num_dimensions)]
        if 0 in sides:
            raise self.make_error(f'tensor "{name}" is empty')
        # GGUF lists the innermost side first, torch last.
        return StoredTensor(
            name=name, shape=tuple(reversed(sides)), format=self.read_number("I"), offset=self.read_number("Q")
        )

    def read_value(self, kind: int) -> Any:
        """Reads and returns a value of GGUF's type `kind`: a string, number, list of strings or `array` of numbers.

        A boolean is a bool, but in an array 0 or 1. Raises ModelError for unknown types and for arrays of arrays.
        """
        if kind == STRING:
            return self.read_string()
        if kind != ARRAY:
            return self.read_number(self.find_number_code(kind))
        kind, count = self.read_number("I"), self.read_number("Q")
        if kind == STRING:
            self.require_bytes(8 * count)
            return [self.read_string() for _ in range(count)]
        code = self.find_number_code(kind)
        # `array` has no booleans: they are read as bytes 0 and 1.
        return array("B" if code == "?" else code, self.read_bytes(count * struct.calcsize("<" + code)))

    def read_string(self) -> str:
        """Reads and returns a string, which is stored as its length in bytes and then UTF-8.

        Raises ModelError if it is not UTF-8.
        """
        try:
            return self.read_bytes(int.from_bytes(self.read_bytes(8), "little")).decode()
        except UnicodeDecodeError as e:
            raise self.make_error(f"text that is not UTF-8: {e.reason}") from e

    def read_number(self, code: str) -> Any:
        """Reads and returns a little-endian number, given its code for the module `struct`, such as "I".

        The code "?" gives a bool.
        """
        return struct.unpack("<" + code, self.read_bytes(struct.calcsize("<" + code)))[0]

    def find_number_code(self, kind: int) -> str:
        """Returns the code for the module `struct`, such as "I", of GGUF's type number `kind`.

        Raises ModelError if `kind` is not a type of numbers.
        """
        if kind not in NUMBERS:
            raise self.make_error(f"a value of unknown type {kind}")
        return NUMBERS[kind]

    def read_bytes(self, count: int) -> bytes:
        """Reads and returns exactly `count` bytes.

        Raises ModelError if fewer are left, or if the header would have more than MAX_HEADER_BYTES.
        """
        self.require_bytes(count)
        self.left -= count
        data = self.file.read(count)
        if len(data) < count:
            raise self.make_error("it became shorter while it was read")
        return data

    def require_bytes(self, count: int) -> None:
        """Raises ModelError unless `count` more bytes are left and the header stays within MAX_HEADER_BYTES.

        Reads nothing.
        """
        if count > self.left:
            raise self.make_error(f"{count} more bytes should follow, but only {self.left} do")
        if self.size - self.left + count > MAX_HEADER_BYTES:
            raise self.make_error(f"more than {MAX_HEADER_BYTES} bytes lie before the weights")

    def make_error(self, why: str) -> ModelError:
        """Returns, but does not raise, the error for a damaged file. `why` says what is wrong with it."""
        return ModelError(f"{self.path} is corrupted or truncated ({why}): download it again")
