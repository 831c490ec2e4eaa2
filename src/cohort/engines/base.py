"""The engine protocol, and the records that engines exchange with their callers.

An engine is driven: the caller submits requests (`submit`) and polls for events (`poll`) until the engine is `idle`.
It can stop a request (`abort`), bring new weights (`load`), and ends with `close`. Sampling, evaluation, serving and
conversations are all built on these calls. A request is token ids plus limits, so continuing a conversation or a
partial sample is the same call as starting a new one. A request may ask that its KV be kept (`keep`), so that the
request of the next turn (`continues`) computes only what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from cohort.errors import ConfigError
from cohort.serialize import record
from cohort.types import Key, Message, Sample, Sampling

# Seconds that a poll may wait for another process when the caller has nothing else to do.
POLL_TIMEOUT = 1.0
# The settings that name the engine on the learner's own weights, for advice. Native engines may be elsewhere too.
ENGINE_HERE = "--engine native --engine.place here"


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """An order to continue `tokens`. Requests with equal first `shared` tokens may store their KV once."""

    id: str
    tokens: list[int]
    sampling: Sampling
    key: Key
    shared: int = -1  # leading tokens that the whole group has in common; -1 = all tokens
    start: int = 0  # position of the first new token in the random stream of `key`; > 0 when a sample is continued
    messages: list[Message] = field(default_factory=list)  # source of `tokens`, for servers that take no token ids
    keep: bool = False
    """Whether the engine keeps the KV after the request has ended, until a request continues it, `forget` or `load`."""
    continues: str = ""
    """Id of an ended request whose prompt and drawn tokens these `tokens` begin with; it may be the id of this request
    too. It is a hint: an engine uses the KV that it has of the same first tokens, and computes the rest. So results do
    not depend on it, but for rounding. "" = a new conversation."""


@record
@dataclass(kw_only=True, slots=True)
class Event:
    """New tokens of one request. `sample` is the finished sample once the request has ended, else None."""

    id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sample: Sample | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """What an engine can do. Training refuses an engine that lacks one of the first three."""

    token_ids: bool = True
    logprobs: bool = True
    live_weights: bool = True
    truncation: bool = True  # says how much probability top-p, top-k and min-p kept; training needs it with these only
    streams: bool = True  # reports tokens of samples that have not ended; training does not need it


@dataclass(kw_only=True, slots=True)
class WorkCounters:
    """Totals since an engine was made: tokens, steps, and seconds per phase. Engines that do not count keep 0."""

    num_prompt_tokens: int = 0
    num_drawn: int = 0
    num_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draw_seconds: float = 0.0


class Weights(Protocol):
    """A learner's weights in the form that an engine loads. Iterating yields (Hugging Face name, full tensor)."""

    @property
    def module(self) -> Any:
        """The learner's decoder if it is in this process, else None. An engine with the same decoder copies nothing."""

    @property
    def specs(self) -> Mapping[str, Any]:
        """Shape and type (a `TensorSpec`) of every tensor by name. They are known before any tensor is gathered."""

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...


class Engine(Protocol):
    """A program that turns requests into samples.

    An engine that has died raises EngineError from `submit`, `poll` and `load`.
    """

    name: str  # what evaluations record: "native", "transformers", "vllm", "server" or "scripted"
    abilities: Abilities
    version: int  # version of the weights that it samples from

    @property
    def work(self) -> WorkCounters:
        """What it has done so far."""

    def submit(self, request: Request) -> None:
        """Queues a request. Raises ConfigError, with the numbers, for a request that can never be served.

        Also raises ConfigError if the id is under way already, and EngineError after `close`.
        """

    @property
    def idle(self) -> bool:
        """Whether no request is under way and no event waits to be reported."""

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Returns the events since the last poll. An empty list means only that nothing is new yet.

        An engine in this process computes some steps and ignores `timeout`. An engine that waits for another process
        waits up to `timeout` seconds for the first event.
        """

    def abort(self, id: str) -> Sample:
        """Stops a request and returns its partial sample, with finish = abort. Raises CohortError for an unknown id.

        The sample is empty from engines that get no partial answers (a server). No event for it follows. None of its KV
        is kept.
        """

    def forget(self, id: str) -> None:
        """Drops the KV that is kept for an ended request, if there is any.

        Engines without KV of their own do nothing. Nor does an unknown id, because an engine drops what it keeps
        whenever memory is short.
        """

    def load(self, weights: Weights, version: int) -> None:
        """Samples from `weights` from now on, as `version`, and drops all cached KV, kept or in use.

        Requests under way go on; their samples record from which token on which version was used. Engines without
        `abilities.live_weights` raise ConfigError.
        """

    def close(self) -> None:
        """Drops every request, without events, and frees the engine's caches. A later `submit` raises EngineError.

        A second call does nothing. A model that the engine has loaded itself (vLLM) may stay in memory.
        """


@runtime_checkable
class RestartingEngine(Protocol):
    """An engine that starts parts of itself again, such as processes that died, and gives them the current weights."""

    late_proof: Callable[[ComparableEngine], object] | None
    """Proves the weights of a part that got them late, before the part is used. `WeightSync` sets it after each proof;
    None = the current weights are not proved yet, and the next proof covers all parts."""


@runtime_checkable
class ComparableEngine(Protocol):
    """An engine with weights of its own, whose log-probabilities can be compared with the learner's.

    Engines that sample from the learner's own storage need no comparison, and have no such method.
    """

    def compute_logprobs(self, tokens: list[int]) -> list[list[float]]:
        """Returns the log-probability of every token after the first, given those before it, at temperature 1.

        There is one list per copy of the weights that the engine samples from: each must be proved. They are computed
        from the current weights alone: nothing that was cached before is used. Requests under way go on.
        """


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine with memory of its own that a learner may have between rollouts."""

    def sleep(self) -> None:
        """Frees memory of weights and KV until the next `load`. Does nothing while requests are under way."""


def sample(engine: Engine, requests: Iterable[Request]) -> dict[str, Sample]:
    """Submits the requests, polls until the engine is idle, and returns the finished samples by request id.

    The samples are in the order in which they ended. Requests that were already under way are finished and returned
    too.
    """
    for request in requests:
        engine.submit(request)
    # Requests submitted before this call are finished and returned too.
    done: dict[str, Sample] = {}
    while not engine.idle:
        done.update({e.id: e.sample for e in engine.poll(POLL_TIMEOUT) if e.sample is not None})
    return done


def require_for_training(abilities: Abilities, name: str, truncates: bool = False) -> None:
    """Raises ConfigError if the engine called `name` lacks token ids, log-probabilities or live weights.

    `truncates` says that top-p, top-k or min-p is set, which not every engine can do in training.
    """
    needs = {
        "token ids": abilities.token_ids,
        "log-probabilities": abilities.logprobs,
        "the loading of new weights": abilities.live_weights,
    }
    if missing := [what for what, has in needs.items() if not has]:
        raise ConfigError(
            f"--engine {name} is for cohort eval only, because it lacks {', '.join(missing)}. Train with --engine "
            "native, or remove --engine."
        )
    if truncates and not abilities.truncation:
        raise ConfigError(
            f"--engine {name} cannot train with top-p, top-k or min-p: it does not say how much probability they kept. "
            "Remove --sampling.top_p, --sampling.top_k and --sampling.min_p, or train with --engine native."
        )
