"""Writer for safetensors files that threads fill piece by piece, in any order.

A safetensors file is a header that says where each tensor lies, and then the tensors. The header depends only on shapes
and types. So files are laid out first, and no tensor has to be in memory as a whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Shape and type of a tensor that will be read or written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in bytes."""
        count = self.dtype.itemsize
        for side in self.shape:
            count *= side
        return count


class ShardWriter:
    """The weight files of a model folder, open for writing. A context manager that closes them.

    Creates the files and, if there are several, their index. A file has at most `max_bytes` of tensors, unless one
    tensor alone is larger.
    """

    def __init__(self, folder: Path, specs: Mapping[str, TensorSpec], max_bytes: int) -> None:
        self._open = ExitStack()
        self._places: dict[str, tuple[int, int]] = {}  # name -> (file descriptor, first byte)
        shards = _split_into_shards(specs, max_bytes)
        self.num_files = len(shards)
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(shards, start=1):
            name = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            self._create_file(folder / name, shard)
            weight_map |= dict.fromkeys(shard, name)
        if len(shards) > 1:
            total = sum(spec.num_bytes for spec in specs.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Writes `values` into the file of the tensor `name`, beginning at its entry number `first`, counted from 0.

        `values` must be contiguous, on the CPU and of the tensor's type. Any thread may call this at any time.
        """
        file, offset = self._places[name]
        offset += first * values.dtype.itemsize
        rest = values.view(-1).view(torch.uint8).numpy().data
        # pwrite has its own offset, so threads do not disturb each other. It may write less than it is given.
        while rest:
            count = os.pwrite(file, rest, offset)
            rest, offset = rest[count:], offset + count

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _create_file(self, path: Path, shard: Mapping[str, TensorSpec]) -> None:
        """Creates the file `path` in full size for the tensors of `shard`, with a header. Records where each begins.

        The file stays open until the writer is closed. It must not exist yet.
        """
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        # Wide types come first, so that every tensor starts at a multiple of its type's width.
        for name, spec in sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize):
            end = offset + spec.num_bytes
            header[name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        # Padded with spaces, so that the tensors start at a multiple of 8 bytes.
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        # The file stays open until the writer is closed.
        file = self._open.enter_context(_open_new_file(path))
        os.write(file, len(text).to_bytes(8, "little") + text)
        os.truncate(file, start + offset)
        for name in shard:
            self._places[name] = (file, start + header[name]["data_offsets"][0])


def _split_into_shards(specs: Mapping[str, TensorSpec], max_bytes: int) -> list[dict[str, TensorSpec]]:
    """Returns the specs divided into one dict per file, in their order, each with at most `max_bytes` of tensors.

    A tensor that is larger alone gets its own file. There is at least one dict, which is empty without specs.
    """
    shards: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.num_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.num_bytes
    return shards


@contextmanager
def _open_new_file(path: Path) -> Iterator[int]:
    """Creates a file that must not exist yet and yields its descriptor, open for writing. Closes it after the block."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield file
    finally:
        os.close(file)
