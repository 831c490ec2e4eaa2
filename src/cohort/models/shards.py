"""Safetensors files laid out before their tensors exist: threads fill them piece by piece, in any order.

The format is a header that says where each tensor lies, then the tensors. The header follows from shapes and types
alone, so nothing has to be held in memory until a file is complete.
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
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A tensor to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        count = self.dtype.itemsize
        for side in self.shape:
            count *= side
        return count


class Shards:
    """The weight files of a model folder, open for writing."""

    def __init__(self, folder: Path, specs: Mapping[str, Spec], max_bytes: int) -> None:
        self._open = ExitStack()
        self._places: dict[str, tuple[int, int]] = {}  # name -> (file, byte)
        shards = _split(specs, max_bytes)
        self.num_files = len(shards)
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(shards, start=1):
            name = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            self._lay_out(folder / name, shard)
            weight_map |= dict.fromkeys(shard, name)
        if len(shards) > 1:
            total = sum(spec.num_bytes for spec in specs.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Put contiguous values at their place in a tensor, from its number `first` on. Safe from any thread."""
        file, at = self._places[name]
        at += first * values.dtype.itemsize
        left = values.view(-1).view(torch.uint8).numpy().data
        while left:
            count = os.pwrite(file, left, at)
            left, at = left[count:], at + count

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _lay_out(self, path: Path, shard: Mapping[str, Spec]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        # wide types first: every tensor then starts at a multiple of its own width
        for name, spec in sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize):
            end = at + spec.num_bytes
            header[name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        file = self._open.enter_context(_writable(path))
        os.write(file, len(text).to_bytes(8, "little") + text)
        os.truncate(file, start + at)
        for name in shard:
            self._places[name] = (file, start + header[name]["data_offsets"][0])


def _split(specs: Mapping[str, Spec], max_bytes: int) -> list[dict[str, Spec]]:
    shards: list[dict[str, Spec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.num_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.num_bytes
    return shards


@contextmanager
def _writable(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield file
    finally:
        os.close(file)
