"""The policy losses: what each sampled token contributes. One registered function per loss.

A surrogate function gets the tokens in the loss and its settings. It returns one term per token; their weighted sum is
the policy loss. KL, entropy, correction and aggregation are added in the same way for all of them
(`cohort.algos.loss`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cohort.config.algos import ALGOS, Clipped, Policy
from cohort.errors import ConfigError
from cohort.user_code import describe_result, report_errors


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

    @property
    def ratio(self) -> Tensor:
        """r = p / p_old [T]: the probability of each token, over that at the start of the step."""
        return self.log_ratio.exp()


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


def find_surrogate(config: Policy) -> RegisteredSurrogate | None:
    """Returns the policy loss of the algorithm that `config` belongs to; None if there is none.

    It is the method `policy_loss` of its class, the function registered under the name of its class, or that of the
    nearest class that it inherits.
    """
    for cls in type(config).__mro__:
        if "policy_loss" in vars(cls):
            return RegisteredSurrogate(_call_policy_loss, per_token=bool(getattr(config, "per_token", True)))
        name = ALGOS.get_name(cls) if issubclass(cls, Policy) else None
        if name in _surrogates:
            return _surrogates[name]
    return None


def _call_policy_loss(tokens: Tokens, config: Any) -> Surrogate:
    """Returns the result of `config.policy_loss(tokens)`, a user's method, as a Surrogate.

    A bare tensor are the terms. Raises UserCodeError if the method raises, and ConfigError if it does not return one
    real term per token that has a gradient. Lack of memory passes through, because the learner tries again with less.
    """
    what = f"the method policy_loss of {type(config).__name__}"
    with report_errors(what, type(config).policy_loss, passing=(torch.OutOfMemoryError,)):
        result = config.policy_loss(tokens)
    surrogate = result if isinstance(result, Surrogate) else Surrogate(terms=result, ratio=tokens.ratio.detach())
    terms = surrogate.terms
    shape = list(terms.shape) if isinstance(terms, Tensor) else None
    if shape != list(tokens.logprobs.shape):
        got = f"a tensor of shape {shape}" if shape is not None else describe_result(terms, type(config).policy_loss)
        raise ConfigError(
            f"{what} returned {got}; it must return one loss term per token, a tensor of shape "
            f"{list(tokens.logprobs.shape)} like tokens.logprobs. Leave sums and means to the setting algo.aggregate."
        )
    if not terms.is_floating_point():
        raise ConfigError(
            f"{what} returned terms of type {str(terms.dtype).removeprefix('torch.')}; they must be real "
            "floating-point numbers, like tokens.logprobs. Compute them from it or tokens.ratio, without complex "
            "numbers."
        )
    if tokens.logprobs.requires_grad and not terms.requires_grad:
        raise ConfigError(
            f"{what} returned terms without a gradient, so nothing would be learned; compute them from tokens.logprobs "
            "or tokens.ratio, without detach()."
        )
    return surrogate


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
