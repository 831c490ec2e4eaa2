"""GSPO: one ratio per sample, clipped."""

from __future__ import annotations

import torch

from cohort.algos.segments import segment_mean
from cohort.algos.surrogates import Surrogate, Tokens, mark_clipped, surrogate
from cohort.config.algos import GSPO


@surrogate("gspo", per_token=False)
def gspo_surrogate(t: Tokens, c: GSPO) -> Surrogate:
    """Returns PPO's clipped loss terms [T] with the sample's ratio s = (p / p_old)^(1 / length) for each of its tokens.

    p is the probability of the whole sample, so s is the geometric mean of the ratios of its tokens. The gradient of
    each term reaches all tokens of the sample.
    """
    ratio, A = segment_mean(t.log_ratio, t.segments).exp(), t.advantages
    terms = -torch.minimum(ratio * A, ratio.clamp(1.0 - c.clip_low, 1.0 + c.clip_high) * A)
    return Surrogate(terms=terms, ratio=ratio, **mark_clipped(ratio, A, c))


@surrogate("gspo_token", per_token=False)
def gspo_token_surrogate(t: Tokens, c: GSPO) -> Surrogate:
    """Returns PPO's clipped loss terms [T] with the ratio sg(s) p / sg(p) of each token; sg means without gradient.

    s is the sample's ratio of GSPO and p the token's probability. The values are those of `gspo_surrogate`, but the
    gradient of a term reaches its own token alone.
    """
    ratio, A = segment_mean(t.log_ratio.detach(), t.segments).exp(), t.advantages
    token_ratio = ratio * (t.logprobs - t.logprobs.detach()).exp()
    terms = -torch.minimum(token_ratio * A, token_ratio.clamp(1.0 - c.clip_low, 1.0 + c.clip_high) * A)
    return Surrogate(terms=terms, ratio=ratio, **mark_clipped(ratio, A, c))
