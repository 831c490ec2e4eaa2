"""Memory of a GPU that a process offers and another one of this machine opens (CUDA IPC).

It is the driver's own memory, not torch's: some segments of torch's allocator cannot be passed on, and it keeps a
shared tensor for ever if a process that has opened it dies. This memory is freed when the caller says so.
"""

from __future__ import annotations

import base64
import ctypes

import torch
from torch import Tensor

from cohort.engines.fleet.base import MemoryHandle
from cohort.engines.fleet.in_vllm.cohort_worker import DriverHandle, OpenedMemory, call_driver, name_gpu, wrap_memory
from cohort.errors import EngineError

PAGE_BYTES = 2 << 20  # memory that is passed on is passed on in whole pages
ADVICE = "Let weights pass as files: --engine.transfer files."


class OfferedMemory:
    """Memory on a GPU that other processes may open by its `handle`. `tensor` has its bytes."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._address = ctypes.c_uint64()
        with torch.cuda.device(device):
            gpu = name_gpu()
            self._allocate(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
            handle = DriverHandle()
            try:
                call_driver("cuIpcGetMemHandle", ctypes.byref(handle), self._address)
            except RuntimeError:
                call_driver("cuMemFree_v2", self._address)
                raise
            self.tensor: Tensor | None = wrap_memory(self._address.value, num_bytes)
        self.handle = MemoryHandle(gpu=gpu, data=base64.b64encode(bytes(handle)).decode(), num_bytes=num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        """Takes memory from the driver. If it has none left, torch gives up what it keeps of freed tensors."""
        size = ctypes.c_size_t(num_bytes)
        try:
            call_driver("cuMemAlloc_v2", ctypes.byref(self._address), size)
        except RuntimeError:
            torch.cuda.empty_cache()
            call_driver("cuMemAlloc_v2", ctypes.byref(self._address), size)

    def wait(self) -> None:
        """Returns when everything that was copied into the memory is there."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Frees the memory. A process that has opened it must not use it any more. A second call does nothing."""
        if self.tensor is not None:
            with torch.cuda.device(self._device):
                self.wait()
                self.tensor = None
                call_driver("cuMemFree_v2", self._address)


def offer_memory(num_bytes: int, device: torch.device) -> OfferedMemory:
    """Returns memory on a GPU that other processes can open. Raises EngineError if this machine has no such memory."""
    try:
        return OfferedMemory(num_bytes, device)
    except (RuntimeError, OSError) as error:
        raise EngineError(f"{num_bytes / 2**20:.0f} MiB of {device} cannot be shared ({error}). {ADVICE}") from error


def open_memory(handle: MemoryHandle) -> OpenedMemory:
    """Returns memory that another process offers. Raises EngineError if this process cannot open it."""
    try:
        return OpenedMemory(handle.gpu, handle.data, handle.num_bytes)
    except (RuntimeError, OSError) as error:
        raise EngineError(f"an engine cannot open memory of the learner's GPU ({error}). {ADVICE}") from error
