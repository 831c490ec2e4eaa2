"""What a fleet knows of its replicas: engines with weights of their own, in other processes or behind servers.

A replica is driven by blocking calls with a time limit, and reports samples that ended through a queue. It may be lost
at any moment: its process dies, or it says nothing for too long. Every call then raises `ReplicaLost`, with the reason.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cohort.engines.base import Request, WorkCounters
from cohort.errors import CohortError, EngineError
from cohort.serialize import record
from cohort.types import Sample


class ReplicaLost(EngineError):
    """A replica has died, hangs, or cannot be reached. The message is the reason, as the end of a sentence."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Forgotten:
    """An order to drop the KV that is kept for an ended request."""

    id: str


Order = Request | Forgotten


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedWeights:
    """What a replica says of the weights that it has loaded."""

    version: int
    checksums: dict[str, int] = field(default_factory=dict)  # by tensor; {} = the replica cannot compute them


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryHandle:
    """Memory on a GPU that another process of this machine can open, as plain values."""

    gpu: str  # the GPU's own id: its number is another one in a process that sees fewer of them
    data: str  # what the driver calls the memory, in base64
    num_bytes: int


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """A tensor, and where it lies in such memory."""

    name: str
    dtype: str  # as torch calls it, such as "bfloat16"
    shape: list[int]
    offset: int = 0  # of its first byte


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedWeights:
    """Weights that come through memory on a GPU, a portion at a time.

    Asking for the next portion overwrites the one before: a replica must have copied it by then.
    """

    handle: MemoryHandle
    tensors: list[TensorPlace]  # all that will come; their offsets say nothing
    portions: Iterator[list[TensorPlace]]


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """Something that a replica reports by itself: a sample that ended, an error of the model, or that it was lost."""

    replica: int  # its number in the fleet
    serial: int  # that the replica had; news of an earlier start are out of date
    id: str = ""
    sample: Sample | None = None
    error: CohortError | None = None


NewsQueue = queue.SimpleQueue[News]


class Replica(Protocol):
    """One engine of a fleet."""

    where: str  # for messages: "engine process 2 of 2 on cpu", "the server http://localhost:8000"
    is_ours: bool  # whether this program starts and ends it; else it is waited for
    serial: int  # changes with every start and end
    work: WorkCounters  # since the last start; zeros if it does not count

    def start(self) -> None:
        """Starts the replica, or waits until it can be reached, and returns when it is ready.

        It has the model as in its files then. Raises ReplicaLost if that fails or takes too long. May be called again
        after `end`.
        """

    def send(self, orders: Sequence[Order]) -> None:
        """Hands over requests and what to forget, in this order. News about the requests come through the queue."""

    def abort(self, id: str) -> Sample | None:
        """Stops a request and returns its partial sample. None = it has ended, and its news are in the queue."""

    def load(self, folder: Path, version: int) -> LoadedWeights:
        """Loads the weights in a folder as `version`, drops all cached KV, and says what it has then.

        Requests under way go on with the new weights. Raises another CohortError for weights that the model refuses.
        """

    def load_offered(self, offered: OfferedWeights, version: int) -> LoadedWeights:
        """Loads weights from memory on the GPU, as `load` does from a folder. The memory is closed at the end.

        Only replicas on the learner's own GPU are asked for it.
        """

    def compute_logprobs(self, tokens: list[int]) -> list[float]:
        """Returns the log-probability of every token after the first, at temperature 1, with the current weights."""

    def find_fault(self, is_busy: bool) -> str:
        """Returns why the replica counts as lost, as the end of a sentence; "" = it is well.

        `is_busy` says that it has requests under way: then silence counts as a fault after a time.
        """

    def end(self) -> None:
        """Ends the replica's process, or gives up what it still does. Its later news are out of date."""
