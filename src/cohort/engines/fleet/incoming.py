"""Weights on their way into an engine process, through memory of its GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cohort.engines.fleet import gpu_memory
from cohort.engines.fleet.base import MemoryHandle, TensorPlace
from cohort.engines.fleet.in_vllm.cohort_worker import view_tensor
from cohort.engines.weights import WeightCopy
from cohort.models.auto import AnyDecoder
from cohort.models.shards import TensorSpec


class IncomingWeights:
    """Copies weights into a decoder, a portion at a time, from memory that another process fills.

    `tensors` are all that will come: they are compared with the decoder before the first is copied. Raises ModelError
    if they are those of another model, EngineError if the memory cannot be opened.
    """

    def __init__(self, handle: MemoryHandle, tensors: Sequence[TensorPlace], decoder: AnyDecoder) -> None:
        specs = {t.name: TensorSpec(shape=tuple(t.shape), dtype=getattr(torch, t.dtype)) for t in tensors}
        self._copy = WeightCopy(specs, decoder)
        self._memory = gpu_memory.open_memory(handle)

    def copy(self, tensors: Sequence[TensorPlace]) -> None:
        """Copies the tensors that are in the memory now. When it returns, others may take their place."""
        for t in tensors:
            self._copy.add(t.name, view_tensor(self._memory.tensor, t.dtype, t.shape, t.offset))
        self._memory.wait()

    def finish(self) -> None:
        """Closes the memory. Raises ModelError if a tensor has not come."""
        self.close()
        self._copy.finish()

    def close(self) -> None:
        """Closes the memory."""
        self._memory.close()
