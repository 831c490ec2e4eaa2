"""What a replica knows of a kind of server: how it is asked, and what it can tell.

A dialect turns requests into calls and replies into records. It keeps nothing: everything that it needs is given.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

from cohort.engines.fleet.calls import FailedCall, RefusedCall, ServerCalls
from cohort.errors import ConfigError, EngineError
from cohort.types import Sampling

log = logging.getLogger(__name__)

# Servers write this, or a little less, for the logarithm of 0 and for what is not a number: JSON has neither.
IMPOSSIBLE_LOGPROB = -9_000.0
# Rounding may make the logarithm of a probability near 1 a little larger than 0.
LARGEST_LOGPROB = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Tokens that a server is to continue."""

    id: str  # by which the server can be told to stop
    tokens: list[int]
    max_tokens: int
    sampling: Sampling  # its `max_tokens` is not used
    seed: int
    label: str  # of the current weights: what the server caches is kept apart by it


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a server has drawn for a question. If weights were loaded meanwhile, it may be only the beginning."""

    tokens: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    labels: list[tuple[int, str]]  # (index of first token, label of the weights), in order


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """What a server says of itself."""

    version: str
    context: int  # most tokens of a prompt and its completion; 0 = it does not say


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """How Cohort starts a server. Each dialect turns it into a command."""

    python: str  # the interpreter of the environment that has the server's package
    folder: Path  # of the model
    dtype: str
    context: int
    slots: int
    memory: float  # share of a GPU's memory
    tensor: int  # GPUs that hold the model together
    on_cpu: bool
    threads: int  # on a CPU


class Dialect(Protocol):
    """A kind of server. All calls have a limit of `seconds` and raise what `ServerCalls` raises."""

    name: str  # of the engine: "vllm" or "sglang"
    package: str  # that its environment needs
    title: str  # as its makers write it
    tried_versions: tuple[str, ...]
    has_sockets: bool  # whether it can listen on a Unix socket

    def make_command(self, settings: ServerSettings, listen: Sequence[str]) -> list[str]:
        """Returns the command that starts a server. `listen` are the flags for its address."""

    def make_environment(self, settings: ServerSettings) -> dict[str, str]:
        """Returns the environment variables that a server needs."""

    async def is_healthy(self, calls: ServerCalls, seconds: float) -> bool:
        """Returns whether the server has loaded its model. Raises what `ServerCalls.is_up` raises."""

    async def inspect(self, calls: ServerCalls, seconds: float) -> ServerFacts:
        """Returns what the server is, and lets it go on if it is paused.

        Raises ConfigError, with what to change, for a server that cannot be trained with.
        """

    async def beat(self, calls: ServerCalls, seconds: float) -> None:
        """Returns when the part of the server that computes has given a sign of life."""

    async def continue_tokens(self, calls: ServerCalls, question: Question, seconds: float) -> Part:
        """Returns what the server draws after the tokens of a question."""

    async def abort(self, calls: ServerCalls, id: str, seconds: float) -> None:
        """Stops a question. The call that waits for it returns what it has, with finish = abort."""

    async def compute_logprobs(self, calls: ServerCalls, tokens: list[int], label: str, seconds: float) -> list[float]:
        """Returns the log-probability of every token after the first, at temperature 1."""

    async def load(self, calls: ServerCalls, folder: Path, label: str, seconds: float) -> str:
        """Loads the weights in a folder, drops what was cached, and returns the label that the server then reports.

        Questions under way go on, or return what they have, with finish = abort. Raises EngineError for weights that
        the server does not take.
        """


@cache
def warn_untried(title: str, version: str, tried: tuple[str, ...]) -> None:
    """Logs a warning, once, about a version of a server that was never tried."""
    if not version.startswith(tuple(f"{number}." for number in tried)):
        known = f"only {', '.join(tried)}" if tried else "nor was any other: only a stand-in for it"
        log.warning("%s %s was never tried with Cohort, %s", title, version, known)


@cache
def warn_hardware(title: str) -> None:
    """Logs a warning, once, about servers on GPUs."""
    log.warning("servers of %s on GPUs are untested on this hardware: they were tried on a CPU alone", title)


def read_logprobs(values: Sequence[Any]) -> list[float]:
    """Returns log-probabilities in a server's JSON as numbers.

    Raises EngineError for one that no drawn or given token has, and FailedCall for what is no number.
    """
    if not all(type(value) in (int, float) for value in values):
        raise FailedCall("sent log-probabilities that are no numbers")
    # Written so that NaN fails too. Whole numbers may be larger than any float.
    if not all(IMPOSSIBLE_LOGPROB < value <= LARGEST_LOGPROB for value in values):
        raise EngineError(
            "a server computes log-probabilities that none can be (above 0, far below, or no numbers): its weights may "
            "be damaged."
        )
    return [float(value) for value in values]


def read_field(reply: Any, *path: str | int) -> Any:
    """Returns a value deep inside a reply. Raises FailedCall if the reply does not have it."""
    value = reply
    for name in path:
        try:
            value = value[name]
        except (KeyError, IndexError, TypeError):
            words = ".".join(map(str, path))
            raise FailedCall(f"sent a reply without {words}: is it a server of another kind or version?") from None
    return value


def read_tokens(value: Any) -> list[int]:
    """Returns token ids in a reply. Raises FailedCall if it has something else."""
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise FailedCall("sent token ids that are no numbers")
    return value


def read_finish(reason: Any) -> Literal["stop", "length", "abort"]:
    """Returns the reason for which a completion ended. Raises EngineError for one of the server's own."""
    match reason:
        case "stop" | "length" | "abort":
            return reason
    raise EngineError(f'a server broke a request off, with the reason "{reason}". Continue: cohort resume RUN.')


def explain_refusal(calls: ServerCalls, refused: RefusedCall, advice: str) -> ConfigError:
    """Returns the error for a server that refuses what training needs. `advice` is what is missing, if not the key."""
    if refused.status == 401:
        advice = "set the environment variable COHORT_API_KEY to its API key."
    return ConfigError(f"the server {calls.address} refuses what training needs ({refused}): {advice}")
