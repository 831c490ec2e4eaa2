"""What an engine is: something driven, not called.

`submit` requests, `poll` for what happened, `abort` what is no longer wanted, `load` new weights. Sampling,
evaluation, serving and conversations are all built on these four. A request is token ids plus limits, so that
continuing a conversation or a partial sample is the same call as starting one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from cohort.types import Key, Message, Sample, Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Continue `tokens`. Requests whose first `shared` tokens are equal may share them in memory."""

    id: str
    tokens: list[int]
    sampling: Sampling
    key: Key
    shared: int = -1  # leading tokens common to the group; -1 = all of them
    start: int = 0  # position, in the key's stream, of the first token to be drawn (> 0 when continuing)
    messages: list[Message] = field(default_factory=list)  # what the tokens were made from: a server takes no ids


@dataclass(kw_only=True, slots=True)
class Event:
    """New tokens of one request, and its finished sample when it ended."""

    id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sample: Sample | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """What an engine can do; training refuses one that cannot do what it needs."""

    token_ids: bool = True
    logprobs: bool = True
    live_weights: bool = True


class Weights(Protocol):
    """A learner's weights, to be loaded by an engine.

    `module` is the live decoder when it is in this process (an engine holding the same one copies nothing);
    iterating yields (Hugging Face name, full tensor).
    """

    @property
    def module(self) -> Any: ...

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...


class Engine(Protocol):
    """Turns requests into samples."""

    abilities: Abilities

    def submit(self, request: Request) -> None:
        """Queue a request. Refuses, naming the numbers, one that can never fit."""

    def poll(self) -> list[Event]:
        """Do some work and report it; an empty list means nothing is under way."""

    def abort(self, id: str) -> Sample:
        """Stop a request and return what it has, finish = abort."""

    def load(self, weights: Weights, version: int) -> None:
        """Take new weights and drop every cached KV. Samples under way carry both versions as spans."""


def sample(engine: Engine, requests: Iterable[Request]) -> dict[str, Sample]:
    """Run requests to their end: the whole of blocking sampling."""
    for request in requests:
        engine.submit(request)
    done: dict[str, Sample] = {}
    while events := engine.poll():
        done.update({e.id: e.sample for e in events if e.sample is not None})
    return done
