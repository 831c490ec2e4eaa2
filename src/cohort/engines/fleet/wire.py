"""What an engine process and the process that uses it say to each other: records, each behind its length.

Only bytes of `cohort.serialize` pass, which reads no code.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field
from typing import Any, Literal

from cohort.engines.base import Request, WorkCounters
from cohort.engines.fleet.base import Forgotten, MemoryHandle, TensorPlace
from cohort.serialize import dumps, loads, record
from cohort.types import Sample

LENGTH_BYTES = 8
MAX_MESSAGE = 1 << 31
BEAT_SECONDS = 1.0  # between two signs of life of an engine that works and has nothing to report


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineHello:
    """The first message to an engine process: the model, and how to sample from it."""

    folder: str  # of the model
    dtype: str
    device: str
    threads: int
    slots: int
    context: int
    weights: Literal["shared", "packed", "fp16"]
    window: int | None
    memory: float = 1.0  # share of its GPU's memory that it may use


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineWork:
    """Requests, and what to forget, in this order. All of them are known before the engine makes its next step."""

    orders: list[Request | Forgotten] = field(default_factory=list)


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCall:
    """A call that is answered by an `EngineReply` with the same number."""

    number: int
    # Weights come from a folder (load), or through memory of the GPU (open, then copy for each portion, then finish).
    what: Literal["abort", "load", "open", "copy", "finish", "logprobs"]
    id: str = ""  # of the request to abort
    folder: str = ""  # with the weights to load
    version: int = 0
    memory: MemoryHandle | None = None  # to open
    tensors: list[TensorPlace] = field(default_factory=list)  # that will come (open), or are in the memory (copy)
    tokens: list[int] = field(default_factory=list)


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReply:
    """What a call returned, or the error that it raised. The first one, with the number 0, says that all is loaded."""

    number: int
    value: Any = None
    error: str = ""  # the class of an error of Cohort
    text: str = ""


@record
@dataclass(kw_only=True, slots=True)
class EngineNews:
    """Samples that ended, with the ids of their requests. With none it is a sign of life."""

    ids: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    work: WorkCounters = field(default_factory=WorkCounters)
    warnings: list[str] = field(default_factory=list)  # that the engine logged


def limit_sending(connection: socket.socket, seconds: float) -> None:
    """Makes a later `send_message` raise BlockingIOError if the other side takes nothing for so many seconds."""
    # Not `settimeout`, which would be for receiving too: another thread receives.
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def send_message(connection: socket.socket, message: Any) -> None:
    """Sends a record. Raises OSError if the other side is gone or takes nothing."""
    data = dumps(message)
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def receive_message(connection: socket.socket) -> Any:
    """Waits for a record and returns it; None if the other side is gone. Raises ValueError for bytes that are none."""
    head = _receive(connection, LENGTH_BYTES)
    if head is None:
        return None
    length = int.from_bytes(head, "little")
    if length > MAX_MESSAGE:
        raise ValueError(f"a message of {length} bytes")
    data = _receive(connection, length)
    return None if data is None else loads(bytes(data))


def _receive(connection: socket.socket, length: int) -> bytearray | None:
    """Waits for so many bytes and returns them; None if the other side is gone before."""
    data = bytearray(length)
    view = memoryview(data)
    while view:
        try:
            num = connection.recv_into(view)
        except OSError:
            return None
        if num == 0:
            return None
        view = view[num:]
    return data


record(WorkCounters)
