"""The head of a GGUF file: its metadata, and where each tensor lies. Standard library only.

The file may be anyone's. Every count and length in it is compared with the bytes that are left before it is
followed, so that a file cut short or made to do harm ends in a `ModelError`, none of its claims in a huge allocation.
"""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cohort.errors import ModelError

STRING, ARRAY = 8, 9  # types of values; the others are numbers
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MAX_DIMENSIONS = 4
MAX_HEAD = 1 << 28  # bytes; the largest vocabularies take 20 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """What the head says of a tensor."""

    name: str
    shape: tuple[int, ...]  # rows first
    format: int  # GGUF's number for how it is packed
    offset: int  # in the file

    @property
    def num_weights(self) -> int:
        count = 1
        for side in self.shape:
            count *= side
        return count


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Everything in front of the weights."""

    metadata: dict[str, Any]  # numbers, strings, lists of strings, arrays of numbers
    tensors: tuple[StoredTensor, ...]
    num_bytes: int  # of the whole file


def read_head(path: Path) -> Head:
    """The metadata and the list of tensors of a GGUF file."""
    try:
        with open(path, "rb") as file:
            return _Reader(path, file).head()
    except FileNotFoundError as e:
        raise ModelError(f"{path} does not exist") from e
    except OSError as e:
        raise ModelError(f"cannot read {path}: {e.strerror or e}") from e


class _Reader:
    """Reads on from one place in the file to the next."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = self.left = os.fstat(file.fileno()).st_size

    def head(self) -> Head:
        if self.left < 24 or self.take(4) != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file")
        version = self.number("I")
        if version not in (2, 3):
            swapped = " (of a big-endian machine)" if version and version & 0xFFFF == 0 else ""
            raise ModelError(f"{self.path} is GGUF version {version}{swapped}: only 2 and 3 are supported")
        num_tensors, num_values = self.number("Q"), self.number("Q")
        self.expect(num_tensors * 24 + num_values * 13)  # the least that each takes: nothing is begun that cannot end
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            name = self.string()
            if name in metadata:
                raise self.broken(f'"{name}" is there twice')
            metadata[name] = self.value(self.number("I"))
        found = [self.tensor() for _ in range(num_tensors)]
        if len({t.name for t in found}) < len(found):
            raise self.broken("two tensors have the same name")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.broken(f"general.alignment is {alignment!r}")
        start = -(-(self.size - self.left) // alignment) * alignment
        tensors = (StoredTensor(name=t.name, shape=t.shape, format=t.format, offset=start + t.offset) for t in found)
        return Head(metadata=metadata, tensors=tuple(tensors), num_bytes=self.size)

    def tensor(self) -> StoredTensor:
        """Its offset still counts from the first weight."""
        name, num_dimensions = self.string(), self.number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.broken(f'tensor "{name}" has {num_dimensions} dimensions')
        sides = [self.number("Q") for _ in range(num_dimensions)]
        if 0 in sides:
            raise self.broken(f'tensor "{name}" is empty')
        return StoredTensor(name=name, shape=tuple(reversed(sides)), format=self.number("I"), offset=self.number("Q"))

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(self.code(kind))
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING:
            self.expect(8 * count)
            return [self.string() for _ in range(count)]
        code = self.code(kind)
        return array("B" if code == "?" else code, self.take(count * struct.calcsize("<" + code)))

    def string(self) -> str:
        try:
            return self.take(int.from_bytes(self.take(8), "little")).decode()
        except UnicodeDecodeError as e:
            raise self.broken(f"text that is not UTF-8: {e.reason}") from e

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def code(self, kind: int) -> str:
        if kind not in NUMBERS:
            raise self.broken(f"a value of unknown type {kind}")
        return NUMBERS[kind]

    def take(self, count: int) -> bytes:
        self.expect(count)
        self.left -= count
        found = self.file.read(count)
        if len(found) < count:
            raise self.broken("it became shorter while it was read")
        return found

    def expect(self, count: int) -> None:
        if count > self.left:
            raise self.broken(f"{count} more bytes should follow, {self.left} do")
        if self.size - self.left + count > MAX_HEAD:
            raise self.broken(f"more than {MAX_HEAD} bytes lie before the weights")

    def broken(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is corrupted or truncated ({why}): fetch it again")
