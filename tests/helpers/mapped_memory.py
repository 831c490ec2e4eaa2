"""Stands in for `cohort.engines.fleet.gpu_memory` on a machine without a GPU: a file that both processes map.

An engine process gets it in place of that module (`mapped_worker.py`), before it forks: so torch is imported late.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

GPU = "the GPU of the tests"
HOOKS: list[Callable[[Any, int], None]] = []
"""Called with the tensor of offered memory, and the number of its portion, when that is complete."""
SIZES: list[int] = []  # of all memory that was offered, in bytes
OPEN: list[str] = []  # paths of memory that is offered now


class MappedMemory:
    """Memory that another process may map by its path, which takes the place of the driver's handle."""

    def __init__(self, path: str, num_bytes: int) -> None:
        import torch

        from cohort.engines.fleet.base import MemoryHandle

        self.path = path
        self.num_waits = 0
        self.tensor = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        self.handle = MemoryHandle(gpu=GPU, data=path, num_bytes=num_bytes)

    def wait(self) -> None:
        """Calls the hooks."""
        for hook in HOOKS:
            hook(self.tensor, self.num_waits)
        self.num_waits += 1

    def close(self) -> None:
        """Removes the file, if this process has made it."""
        self.tensor = None
        if self.path in OPEN:
            OPEN.remove(self.path)
            os.unlink(self.path)


def offer_memory(num_bytes: int, device: object) -> MappedMemory:
    """Returns new memory."""
    file, path = tempfile.mkstemp()
    os.truncate(file, num_bytes)
    os.close(file)
    SIZES.append(num_bytes)
    OPEN.append(path)
    return MappedMemory(path, num_bytes)


def open_memory(handle: Any) -> MappedMemory:
    """Returns memory of another process. Raises EngineError as the real function does."""
    from cohort.errors import EngineError

    if handle.gpu != GPU:
        raise EngineError(f"an engine cannot open memory of {handle.gpu}. --engine.transfer files")
    return MappedMemory(handle.data, handle.num_bytes)
