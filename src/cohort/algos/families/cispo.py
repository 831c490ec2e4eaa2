"""CISPO: the ratio has an upper bound, and every token keeps its gradient."""

from __future__ import annotations

from cohort.algos.surrogates import Surrogate, Tokens, surrogate
from cohort.config.algos import CISPO


@surrogate("cispo")
def cispo_surrogate(t: Tokens, c: CISPO) -> Surrogate:
    """Returns the loss terms -sg(min(r, clip_high)) A log p of the tokens [T]; sg means without gradient.

    r is the ratio of new to old policy, A the advantage. r only scales the gradient of log p, so a token above the cap
    still trains. Tokens above the cap are marked as `high`.
    """
    ratio = t.log_ratio.detach().exp()
    terms = -ratio.clamp(max=c.clip_high) * t.advantages * t.logprobs
    return Surrogate(terms=terms, ratio=ratio, high=ratio > c.clip_high)
