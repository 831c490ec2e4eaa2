"""The policy losses: what each sampled token contributes. One registered function an algorithm.

A surrogate gets the tokens in the loss and its settings and returns a term for every token, whose weighted sum is the
policy loss. KL, entropy, correction and aggregation are put around it, the same for all (`cohort.algos.loss`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cohort.algos.segments import segment_mean
from cohort.config.algos import CISPO, GMPO, GRPO, GSPO, SAPO, Clipped, Policy


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
    return _surrogates[name]


def registered() -> list[str]:
    """Names that can be built."""
    return sorted(_surrogates)


@surrogate("grpo", "dr_grpo", "dapo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline")
def clipped(t: Tokens, c: Clipped) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 at most -dual_clip A (PPO, arXiv:1707.06347)."""
    ratio, A = t.log_ratio.exp(), t.advantages
    terms = -torch.minimum(ratio * A, ratio.clamp(1.0 - c.clip_low, 1.0 + c.clip_high) * A)
    held = _held(ratio, A, c)
    if isinstance(c, GRPO) and c.dual_clip:
        terms = torch.where(A < 0, torch.minimum(terms, -c.dual_clip * A), terms)
        held["high"] |= (ratio > c.dual_clip) & (A < 0)
    return Surrogate(terms=terms, ratio=ratio, **held)


@surrogate("gspo", per_token=False)
def sequence_clipped(t: Tokens, c: GSPO) -> Surrogate:
    """As PPO with the ratio (p_new / p_old)^(1 / length) of the whole sample."""
    ratio, A = segment_mean(t.log_ratio, t.segments).exp(), t.advantages
    terms = -torch.minimum(ratio * A, ratio.clamp(1.0 - c.clip_low, 1.0 + c.clip_high) * A)
    return Surrogate(terms=terms, ratio=ratio, **_held(ratio, A, c))


@surrogate("gspo_token", per_token=False)
def sequence_clipped_by_token(t: Tokens, c: GSPO) -> Surrogate:
    """GSPO's value with each token's own gradient: the sample's ratio times p / p.detach()."""
    ratio, A = segment_mean(t.log_ratio.detach(), t.segments).exp(), t.advantages
    own = ratio * (t.logprobs - t.logprobs.detach()).exp()
    terms = -torch.minimum(own * A, own.clamp(1.0 - c.clip_low, 1.0 + c.clip_high) * A)
    return Surrogate(terms=terms, ratio=ratio, **_held(ratio, A, c))


@surrogate("gmpo", per_token=False)
def geometric(t: Tokens, c: GMPO) -> Surrogate:
    """-A times the geometric mean of the sample's ratios, each held (in logs) where it would gain by moving on."""
    log_ratio, sign = t.log_ratio, t.advantages.sign()
    held = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-c.clip_low, c.clip_high))
    low, high = (log_ratio < -c.clip_low) & (sign < 0), (log_ratio > c.clip_high) & (sign > 0)
    terms = -t.advantages * segment_mean(held, t.segments).exp()
    return Surrogate(terms=terms, ratio=log_ratio.exp(), low=low, high=high)


@surrogate("cispo")
def capped_weight(t: Tokens, c: CISPO) -> Surrogate:
    """-min(r, cap).detach() A log p: the weight is held, the gradient is not lost."""
    ratio = t.log_ratio.detach().exp()
    terms = -ratio.clamp(max=c.clip_high) * t.advantages * t.logprobs
    return Surrogate(terms=terms, ratio=ratio, high=ratio > c.clip_high)


@surrogate("sapo")
def softly_gated(t: Tokens, c: SAPO) -> Surrogate:
    """-4 / tau sigmoid(tau (r - 1)) A, tau by the sign of A: slope 1 at r = 1, fading on both sides."""
    ratio = t.log_ratio.exp()
    tau = torch.where(t.advantages > 0, torch.full_like(ratio, c.tau_pos), torch.full_like(ratio, c.tau_neg))
    return Surrogate(terms=-torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau * t.advantages, ratio=ratio)


@surrogate("reinforce", "rloo")
def score_function(t: Tokens, c: Policy) -> Surrogate:
    """-A log p, weighted with the detached ratio when the policy has moved since it acted."""
    ratio = t.log_ratio.detach().exp()
    return Surrogate(terms=-ratio * t.advantages * t.logprobs, ratio=ratio)


def _held(ratio: Tensor, A: Tensor, c: Clipped) -> dict[str, Tensor]:
    """Where the minimum takes the clipped side, the token has no gradient."""
    return {"low": (ratio < 1.0 - c.clip_low) & (A < 0), "high": (ratio > 1.0 + c.clip_high) & (A > 0)}
