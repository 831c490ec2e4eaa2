"""The ranks that train together. Numbers that all ranks count, compare or share go through a `World`.

In one process, `sum` and `gather` return the process's own values. Code that uses a `World` therefore never asks how
many ranks there are: it sums and gathers, and the results are those of all ranks together.

Every rank must make the same collective calls in the same order. Each has a time limit, and where one fails the error
says which rank waited, in which phase of which step.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cohort.errors import RankError
from cohort.serialize import dumps, loads

R = TypeVar("R")
# Later versions of torch have other names for the same calls, and warn of the earlier ones.
_SUM_SCATTERED = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_JOIN = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(slots=True)
class Progress:
    """What a rank is doing, for error messages, and the bytes that it has handed to collectives so far."""

    phase: str = "the start"
    step: int = 0  # the step under way, from 1; 0 = none yet
    bytes_by_kind: Counter[str] = field(default_factory=Counter)  # by the name of the collective


class World:
    """The world of one process: rank 0 of 1."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.progress = Progress()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and shows progress."""
        return self.rank == 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context in which errors of collectives name this phase, such as "rollout"."""
        before, self.progress.phase = self.progress.phase, name
        try:
            yield
        finally:
            self.progress.phase = before

    @contextmanager
    def collective(self, kind: str, num_bytes: int = 0) -> Iterator[None]:
        """Context around calls of torch.distributed: counts bytes under `kind`, and raises RankError where they fail.

        It is for collectives that are not methods of a world, such as those of a sharded model.
        """
        self.progress.bytes_by_kind[kind] += num_bytes
        yield

    def sum(self, x: Tensor) -> Tensor:
        """Replaces `x` by its sum over all ranks, in place, and returns it. With one rank, `x` stays as it is."""
        return x

    def begin_sum(self, x: Tensor) -> Callable[[], None]:
        """Begins to replace `x` by its sum over all ranks, in place, and returns a function that waits until it is.

        Until then `x` must be neither read nor changed. With one rank, `x` stays as it is.
        """
        self.sum(x)
        return lambda: None

    def sum_scattered(self, x: Tensor) -> Tensor:
        """Returns this rank's part of the sum of `x` over all ranks. `x` is flat, and its length a multiple of `size`.

        Parts are of equal length, in rank order. With one rank the part is `x` itself.
        """
        return x

    def join(self, part: Tensor) -> Tensor:
        """Returns the parts of all ranks, flat and of equal length, one after another in rank order."""
        return part

    def broadcast(self, x: Tensor) -> Tensor:
        """Replaces `x` by the first rank's, in place, and returns it."""
        return x

    def gather(self, value: Any) -> list[Any]:
        """Returns the values that all ranks pass, in rank order. With one rank, that is [value].

        A value is anything that `cohort.serialize` takes.
        """
        return [value]

    def gather_on_first(self, value: Any) -> list[Any]:
        """Returns the values of all ranks in rank order on the first rank, and [] on the others."""
        return [value]

    def share(self, value: Any) -> Any:
        """Returns the value that the first rank passes. The others pass anything."""
        return value

    def exchange(self, parts: Sequence[Any]) -> list[Any]:
        """Sends `parts[i]` to rank i, and returns what all ranks sent to this one, in rank order."""
        return list(parts)

    def split(self, tensor: int) -> Grid:
        """Divides the ranks into groups of `tensor` neighbours that hold one model together. See `Grid`.

        One process holds all of it, whatever `tensor` is: so commands that inspect a run need no ranks.
        """
        return Grid(whole=self, data=self, tensor=ONE_PROCESS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The ranks as a table: a row of `tensor` ranks holds one model, and every row has its own data."""

    whole: World  # all ranks
    data: World  # the ranks in this rank's column: they have other data, and the same part of the model
    tensor: World  # the ranks in this rank's row: they have the same data, and other parts of the model


ONE_PROCESS = World()


def in_phase(name: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Returns a decorator for methods of objects with a `world`: in them, errors of collectives name this phase."""

    def decorate(method: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **options: Any) -> R:
            with self.world.phase(name):
                return method(self, *args, **options)

        return run

    return decorate


def shorten_reason(error: Exception) -> str:
    """Returns the first sentence of an error of torch.distributed, without the place in its source.

    >>> shorten_reason(RuntimeError("[/x/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically ..."))
    'Connection closed by peer [127.0.0.1]:1'
    """
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip())
    return re.split(r"\.\s|\n", text, maxsplit=1)[0].rstrip(".") or type(error).__name__


class ProcessGroup(World):
    """Ranks of torch.distributed, which the launcher has initialised, with a time limit.

    `group` are the ranks for tensors (gloo or nccl), `control` the same ranks over gloo, for everything else; None =
    all ranks, with new control connections if tensors go through nccl. What a connection cannot read is copied for it:
    nccl reads no host memory, and gloo promises few collectives of GPU memory.
    """

    def __init__(self, group: Any = None, control: Any = None, progress: Progress | None = None) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.progress = progress or Progress()
        self._group = group
        uses_nccl = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if uses_nccl else torch.device("cpu")
        # Records go over gloo also beside GPUs: they would only be copied to a GPU and back.
        self._control = control or (dist.new_group(backend="gloo") if uses_nccl else group)

    @property
    def group(self) -> Any:
        """The group of torch.distributed that tensors go through."""
        return self._group or dist.group.WORLD

    @contextmanager
    def collective(self, kind: str, num_bytes: int = 0) -> Iterator[None]:
        """Context around calls of torch.distributed: counts bytes under `kind`, raises RankError where they fail."""
        self.progress.bytes_by_kind[kind] += num_bytes
        try:
            yield
        except RuntimeError as error:
            # Errors of this process itself, such as memory that ran out, are not about other ranks.
            if isinstance(error, torch.OutOfMemoryError):
                raise
            at = f"in step {self.progress.step}" if self.progress.step else "before the first step"
            raise RankError(
                f"rank {dist.get_rank()} lost the other ranks during {self.progress.phase} {at}: one of them has "
                f"ended, hangs, or cannot be reached ({shorten_reason(error)}). Look for the first error of another "
                "rank, then use cohort resume RUN."
            ) from error

    def sum(self, x: Tensor) -> Tensor:
        """Replaces `x` by its sum over all ranks, in place, and returns it.

        Every rank must call it, with a tensor of the same shape and type.
        """
        self.begin_sum(x)()
        return x

    def begin_sum(self, x: Tensor) -> Callable[[], None]:
        """Begins to replace `x` by its sum over all ranks, in place, and returns a function that waits until it is.

        Every rank must call it, with a tensor of the same shape and type, and in the same order as other collectives.
        """
        carried = self._carry(x)
        with self.collective("sum", x.nbytes):
            work = dist.all_reduce(carried, group=self._group, async_op=True)

        def wait() -> None:
            """Waits until `x` is the sum."""
            with self.collective("sum"):
                work.wait()
            if carried is not x:
                x.copy_(carried)

        return wait

    def sum_scattered(self, x: Tensor) -> Tensor:
        """Returns this rank's part of the sum of `x` over all ranks. `x` is flat, and its length a multiple of `size`.

        Parts are of equal length, in rank order.
        """
        part = torch.empty(len(x) // self.size, dtype=x.dtype, device=x.device)
        self.begin_sum_scattered(part, x)
        return part

    def begin_sum_scattered(self, part: Tensor, x: Tensor, kind: str = "sum_scattered", async_op: bool = False) -> Any:
        """Does what `sum_scattered` does, into `part`, and counts the bytes under `kind`.

        With `async_op` it may return before it is done. Then it returns what `wait` is to be called on, else None.
        """
        return self._fill(_SUM_SCATTERED, part, x, kind, async_op)

    def join(self, part: Tensor) -> Tensor:
        """Returns the parts of all ranks, flat and of equal length, one after another in rank order."""
        whole = torch.empty(len(part) * self.size, dtype=part.dtype, device=part.device)
        self.begin_join(whole, part)
        return whole

    def begin_join(self, whole: Tensor, part: Tensor, kind: str = "join", async_op: bool = False) -> Any:
        """Does what `join` does, into `whole`. The rest is as in `begin_sum_scattered`."""
        return self._fill(_JOIN, whole, part, kind, async_op)

    def _fill(self, call: Callable[..., Any], target: Tensor, source: Tensor, kind: str, async_op: bool) -> Any:
        """Calls a collective that reads `source` and fills `target`. Returns what to wait for; None = it is done."""
        carried = target if self._reads(target) else self._carry(target)
        sent = self._carry(source)
        with self.collective(kind, source.nbytes):
            work = call(carried, sent, group=self._group, async_op=async_op and carried is target)
        if carried is target:
            return work
        target.copy_(carried)
        return None

    def _reads(self, x: Tensor) -> bool:
        """Returns whether the connection reads and writes the memory of `x`."""
        return x.device.type == self._device.type

    def _carry(self, x: Tensor) -> Tensor:
        """Returns `x`, contiguous, in memory that the connection reads: `x` itself or a copy."""
        return x.to(self._device).contiguous()

    def broadcast(self, x: Tensor) -> Tensor:
        """Replaces `x` by the first rank's, in place, and returns it."""
        first = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        carried = self._carry(x)
        with self.collective("broadcast", x.nbytes if self.is_first else 0):
            dist.broadcast(carried, src=first, group=self._group)
        return x if carried is x else x.copy_(carried)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values that all ranks pass, in rank order. Every rank must call it.

        A value is anything that `cohort.serialize` takes.
        """
        return self.exchange([value] * self.size)

    def gather_on_first(self, value: Any) -> list[Any]:
        """Returns the values of all ranks in rank order on the first rank, and [] on the others."""
        found = self.exchange([value] + [None] * (self.size - 1))
        return found if self.is_first else []

    def share(self, value: Any) -> Any:
        """Returns the value that the first rank passes. The others pass anything."""
        return self.exchange([value if self.is_first else None] * self.size)[0]

    def exchange(self, parts: Sequence[Any]) -> list[Any]:
        """Sends `parts[i]` to rank i, and returns what all ranks sent to this one, in rank order."""
        # Equal parts are serialised once.
        known: dict[int, bytes] = {}
        sent = [known.setdefault(id(part), dumps(part)) for part in parts]
        sizes = torch.tensor([len(data) for data in sent], dtype=torch.int64)
        theirs = torch.empty_like(sizes)
        with self.collective("exchange", sum(map(len, sent))):
            dist.all_to_all_single(theirs, sizes, group=self._control)
            received = torch.empty(int(theirs.sum()), dtype=torch.uint8)
            outgoing = torch.frombuffer(bytearray(b"".join(sent)), dtype=torch.uint8)
            dist.all_to_all_single(received, outgoing, theirs.tolist(), sizes.tolist(), group=self._control)
        cuts = received.split(theirs.tolist())
        return [loads(data.numpy().tobytes()) for data in cuts]

    def split(self, tensor: int) -> Grid:
        """Divides the ranks into groups of `tensor` neighbours that hold one model together. See `Grid`.

        Every rank must call it. `tensor` must divide the number of ranks.
        """
        if tensor == 1:
            return Grid(whole=self, data=self, tensor=ONE_PROCESS)
        rows = [list(range(first, first + tensor)) for first in range(0, self.size, tensor)]
        columns = [list(range(column, self.size, tensor)) for column in range(tensor)]
        worlds = {}
        for name, lists in (("tensor", rows), ("data", columns)):
            # Every rank must make every group, in the same order.
            made = [(ranks, dist.new_group(ranks), dist.new_group(ranks, backend="gloo")) for ranks in lists]
            own = next((group, control) for ranks, group, control in made if self.rank in ranks)
            worlds[name] = ProcessGroup(*own, progress=self.progress)
        return Grid(whole=self, data=worlds["data"], tensor=worlds["tensor"])
