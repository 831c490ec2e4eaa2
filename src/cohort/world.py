"""The ranks that train together. Numbers that all ranks count, compare or share go through a `World`.

In one process, `sum` and `gather` return the process's own values. Code that uses a `World` therefore never asks how
many ranks there are: it sums and gathers, and the results are those of all ranks together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor

from cohort.serialize import dumps, loads


class World:
    """The world of one process: rank 0 of 1."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        """Replaces `x` by its sum over all ranks, in place, and returns it. With one rank, `x` stays as it is."""
        return x

    def gather(self, value: Any) -> list[Any]:
        """Returns the values that all ranks pass, in rank order. With one rank, that is [value].

        A value is anything that `cohort.serialize` takes.
        """
        return [value]


ONE_PROCESS = World()


class ProcessGroup(World):
    """The default torch.distributed group (gloo or nccl). The launcher has initialised it, with a time limit."""

    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()
        nccl = torch.distributed.get_backend() == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def sum(self, x: Tensor) -> Tensor:
        """Replaces `x` by its sum over all ranks, in place, and returns it.

        Every rank must call it, with a tensor of the same shape and type.
        """
        # nccl cannot sum tensors in host memory.
        on_device = x.to(self._device)
        torch.distributed.all_reduce(on_device)
        return x if on_device is x else x.copy_(on_device)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values that all ranks pass, in rank order. Every rank must call it.

        A value is anything that `cohort.serialize` takes.
        """
        own_bytes = torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8).to(self._device)
        # all_gather needs tensors of one size: the ranks exchange their sizes first, then padded bytes.
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        torch.distributed.all_gather(sizes, torch.tensor([len(own_bytes)], device=self._device))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: len(own_bytes)] = own_bytes
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        torch.distributed.all_gather(parts, padded)
        return [loads(part[: int(size)].cpu().numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]
