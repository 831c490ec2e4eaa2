"""CISPO: importance weights with an upper bound, and a gradient for every token."""

from __future__ import annotations

from cohort.algos.surrogates import Surrogate, Tokens, surrogate
from cohort.config.algos import CISPO


@surrogate("cispo")
def capped_weight(t: Tokens, c: CISPO) -> Surrogate:
    """-min(r, cap).detach() A log p: the weight is held, the gradient is not lost."""
    ratio = t.log_ratio.detach().exp()
    terms = -ratio.clamp(max=c.clip_high) * t.advantages * t.logprobs
    return Surrogate(terms=terms, ratio=ratio, high=ratio > c.clip_high)
