"""GMPO: the geometric mean of a sample's clipped ratios."""

from __future__ import annotations

import torch

from cohort.algos.segments import segment_mean
from cohort.algos.surrogates import Surrogate, Tokens, surrogate
from cohort.config.algos import GMPO


@surrogate("gmpo", per_token=False)
def gmpo_surrogate(t: Tokens, c: GMPO) -> Surrogate:
    """Returns the loss terms -A exp(mean over the token's sample of clipped log r) [T].

    r is the ratio of new to old policy, A the advantage. log r is clipped at clip_high where A > 0 and at -clip_low
    where A < 0: beyond that, a token has no gradient.
    """
    log_ratio, sign = t.log_ratio, t.advantages.sign()
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-c.clip_low, c.clip_high))
    low = (log_ratio < -c.clip_low) & (sign < 0)
    high = (log_ratio > c.clip_high) & (sign > 0)
    terms = -t.advantages * segment_mean(clipped, t.segments).exp()
    return Surrogate(terms=terms, ratio=log_ratio.exp(), low=low, high=high)
