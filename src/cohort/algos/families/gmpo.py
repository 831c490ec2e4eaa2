"""GMPO: the geometric mean of a sample's clipped ratios."""

from __future__ import annotations

import torch

from cohort.algos.segments import segment_mean
from cohort.algos.surrogates import Surrogate, Tokens, surrogate
from cohort.config.algos import GMPO


@surrogate("gmpo", per_token=False)
def geometric(t: Tokens, c: GMPO) -> Surrogate:
    """-A times the geometric mean of the sample's ratios, each held (in logs) where it would gain by moving on."""
    log_ratio, sign = t.log_ratio, t.advantages.sign()
    held = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-c.clip_low, c.clip_high))
    low, high = (log_ratio < -c.clip_low) & (sign < 0), (log_ratio > c.clip_high) & (sign > 0)
    terms = -t.advantages * segment_mean(held, t.segments).exp()
    return Surrogate(terms=terms, ratio=log_ratio.exp(), low=low, high=high)
