"""The policy losses: what each sampled token contributes. One registered function per loss.

A surrogate function gets the tokens in the loss and its settings. It returns one term per token; their weighted sum is
the policy loss. KL, entropy, correction and aggregation are added in the same way for all of them
(`cohort.algos.loss`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cohort.config.algos import Clipped


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The T tokens in the loss, as a surrogate function sees them."""

    logprobs: Tensor  # [T] current policy; requires grad
    old_logprobs: Tensor  # [T] policy at the start of the step; no grad
    advantages: Tensor  # [T]
    segments: Tensor  # [T] index of the token's sample; the samples follow each other

    @property
    def log_ratio(self) -> Tensor:
        """log r = log p - log p_old [T]: how far each token's probability has moved in this step."""
        return self.logprobs - self.old_logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """Result of a surrogate function: the loss terms of the tokens, and what the metrics need."""

    terms: Tensor  # [T]
    ratio: Tensor  # [T] new over old policy, as the loss uses it: the token's, or its sample's
    low: Tensor | None = None  # [T] bool: clipped at the lower bound, so without gradient; None = it never clips there
    high: Tensor | None = None  # [T] bool: clipped at the upper bound


SurrogateFunction = Callable[[Tokens, Any], Surrogate]
"""(tokens, config of the algorithm) -> loss terms."""


@dataclass(frozen=True, slots=True)
class RegisteredSurrogate:
    """A surrogate function and what the learner must know about it."""

    function: SurrogateFunction
    per_token: bool  # each term depends on its own token alone


_surrogates: dict[str, RegisteredSurrogate] = {}


def surrogate(*names: str, per_token: bool = True) -> Callable[[SurrogateFunction], SurrogateFunction]:
    """Returns a decorator that registers a function as the policy loss of the algorithms `names`.

    The names are keys of `config.algos.ALGOS`; an earlier function of a name is replaced. `per_token` = False is for a
    loss whose term of a token depends on other tokens of the same sample.
    """

    def register(function: SurrogateFunction) -> SurrogateFunction:
        """Registers `function` under every name and returns it unchanged."""
        _surrogates.update({name: RegisteredSurrogate(function, per_token) for name in names})
        return function

    return register


def find_surrogate(name: str) -> RegisteredSurrogate:
    """Returns the registered policy loss of the algorithm `name`. Raises KeyError where none is registered."""
    return _surrogates[name]


def algorithm_names() -> list[str]:
    """Returns the names of all algorithms that have a registered policy loss, sorted.

    Importing `cohort.algos` registers those of Cohort.
    """
    return sorted(_surrogates)


def mark_clipped(ratio: Tensor, A: Tensor, c: Clipped) -> dict[str, Tensor]:
    """Returns {"low": [T] bool, "high": [T] bool}: which tokens are clipped at the lower and at the upper bound.

    These are fields of a `Surrogate`. `A` are the advantages. A token is clipped where min(r A, clip(r) A) takes the
    clipped side: there it has no gradient.
    """
    return {"low": (ratio < 1.0 - c.clip_low) & (A < 0), "high": (ratio > 1.0 + c.clip_high) & (A > 0)}
