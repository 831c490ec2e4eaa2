"""The ranks that train together: what they count, compare and share goes through here.

In one process everything is what it is. Code above never asks for ranks: it sums, it gathers, and the numbers are those
of all ranks together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor

from cohort.serialize import dumps, loads


class World:
    """One process."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        return x

    def gather(self, value: Any) -> list[Any]:
        """What every rank has, by rank; a value is anything that `cohort.serialize` takes."""
        return [value]


ONE_PROCESS = World()


class ProcessGroup(World):
    """The default torch.distributed group (gloo or nccl), which the launcher has initialised with a time limit."""

    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()
        nccl = torch.distributed.get_backend() == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def sum(self, x: Tensor) -> Tensor:
        there = x.to(self._device)  # nccl sums nothing that lies on the host
        torch.distributed.all_reduce(there)
        return x if there is x else x.copy_(there)

    def gather(self, value: Any) -> list[Any]:
        mine = torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8).to(self._device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        torch.distributed.all_gather(sizes, torch.tensor([len(mine)], device=self._device))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        torch.distributed.all_gather(parts, padded)
        return [loads(part[: int(size)].cpu().numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]
