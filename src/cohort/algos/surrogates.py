"""The policy losses: what each sampled token contributes. One registered function an algorithm.

A surrogate gets the tokens in the loss and its settings and returns a term for every token, whose weighted sum is the
policy loss. KL, entropy, correction and aggregation are put around it, the same for all (`cohort.algos.loss`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cohort.config.algos import Clipped


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The T tokens in the loss."""

    logprobs: Tensor  # [T] current policy; requires grad
    old_logprobs: Tensor  # [T] policy at the start of the step; no grad
    advantages: Tensor  # [T]
    segments: Tensor  # [T] index of the token's sample; samples lie end to end

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.old_logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """What a policy loss says of every token."""

    terms: Tensor  # [T]
    ratio: Tensor  # [T] new over old policy, as the loss uses it: the token's, or its sample's
    low: Tensor | None = None  # [T] bool: held at the lower bound, no gradient
    high: Tensor | None = None  # [T] bool: held at the upper bound


Form = Callable[[Tokens, Any], Surrogate]


@dataclass(frozen=True, slots=True)
class Registered:
    form: Form
    per_token: bool  # each term depends on its own token alone


_surrogates: dict[str, Registered] = {}


def surrogate(*names: str, per_token: bool = True) -> Callable[[Form], Form]:
    """Register a policy loss under the names of its config classes in `config.algos.ALGOS`."""

    def register(form: Form) -> Form:
        _surrogates.update({name: Registered(form, per_token) for name in names})
        return form

    return register


def find_surrogate(name: str) -> Registered:
    """The policy loss registered under `name`."""
    return _surrogates[name]


def registered() -> list[str]:
    """Names that can be built."""
    return sorted(_surrogates)


def clip_marks(ratio: Tensor, A: Tensor, c: Clipped) -> dict[str, Tensor]:
    """Where the minimum takes the clipped side, the token has no gradient."""
    return {"low": (ratio < 1.0 - c.clip_low) & (A < 0), "high": (ratio > 1.0 + c.clip_high) & (A > 0)}
