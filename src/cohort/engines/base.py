"""What an engine is: something driven, not called.

`submit` requests, `poll` for what happened until the engine is `idle`, `abort` what is no longer wanted, `load` new
weights, `close` at the end. Sampling, evaluation, serving and conversations are all built on these. A request is token
ids plus limits, so that continuing a conversation or a partial sample is the same call as starting one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from cohort.errors import ConfigError
from cohort.serialize import record
from cohort.types import Key, Message, Sample, Sampling

WAIT = 1.0  # seconds a poll may wait for somebody else where nothing else is to be done


@record
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


@record
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


@dataclass(kw_only=True, slots=True)
class Work:
    """What the engine did since it was made: tokens and seconds by phase. One that does not measure leaves it at 0."""

    num_prompt_tokens: int = 0
    num_drawn: int = 0
    num_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draw_seconds: float = 0.0


class Weights(Protocol):
    """A learner's weights, to be loaded by an engine.

    `module` is the live decoder when it is in this process (an engine holding the same one copies nothing);
    iterating yields (Hugging Face name, full tensor).
    """

    @property
    def module(self) -> Any: ...

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...


class Engine(Protocol):
    """Turns requests into samples.

    An engine that has died raises EngineError from `submit`, `poll` and `load`.
    """

    name: str  # what evaluations record: "native", "transformers", "vllm", "server" or "scripted"
    abilities: Abilities
    version: int  # of the weights it samples from
    work: Work

    def submit(self, request: Request) -> None:
        """Queue a request. Refuses, naming the numbers, one that can never fit."""

    @property
    def idle(self) -> bool:
        """Whether nothing is under way: no request has anything left to report."""

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Report what happened; an empty list means only that there is nothing new yet.

        An engine in this process does some work and ignores `timeout`. One that waits for somebody else waits up to
        `timeout` seconds for the first event.
        """

    def abort(self, id: str) -> Sample:
        """Stop a request and return what it has, finish = abort."""

    def load(self, weights: Weights, version: int) -> None:
        """Take new weights and drop every cached KV. Samples under way carry both versions as spans."""

    def close(self) -> None:
        """Give up every request and all memory; a second call does nothing, a later `submit` raises EngineError."""


def sample(engine: Engine, requests: Iterable[Request]) -> dict[str, Sample]:
    """Run requests to their end: the whole of blocking sampling."""
    for request in requests:
        engine.submit(request)
    done: dict[str, Sample] = {}
    while not engine.idle:
        done.update({e.id: e.sample for e in engine.poll(WAIT) if e.sample is not None})
    return done


def require_for_training(abilities: Abilities, name: str) -> None:
    """Refuse an engine that cannot do what training needs, by what it states of itself."""
    needs = {
        "token ids": abilities.token_ids,
        "log-probabilities": abilities.logprobs,
        "live weights": abilities.live_weights,
    }
    if missing := [what for what, has in needs.items() if not has]:
        raise ConfigError(
            f"engine {name} cannot train: it has no {' and no '.join(missing)}. Train with --engine native; "
            f"{name} is for cohort eval."
        )
