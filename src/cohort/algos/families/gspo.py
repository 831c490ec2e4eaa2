"""GSPO: one ratio per sample, clipped."""

from __future__ import annotations

import torch

from cohort.algos.segments import segment_mean
from cohort.algos.surrogates import Surrogate, Tokens, clip_marks, surrogate
from cohort.config.algos import GSPO


@surrogate("gspo", per_token=False)
def sequence_clipped(t: Tokens, c: GSPO) -> Surrogate:
    """As PPO with the ratio (p_new / p_old)^(1 / length) of the whole sample."""
    ratio, A = segment_mean(t.log_ratio, t.segments).exp(), t.advantages
    terms = -torch.minimum(ratio * A, ratio.clamp(1.0 - c.clip_low, 1.0 + c.clip_high) * A)
    return Surrogate(terms=terms, ratio=ratio, **clip_marks(ratio, A, c))


@surrogate("gspo_token", per_token=False)
def sequence_clipped_by_token(t: Tokens, c: GSPO) -> Surrogate:
    """GSPO's value with each token's own gradient: the sample's ratio times p / p.detach()."""
    ratio, A = segment_mean(t.log_ratio.detach(), t.segments).exp(), t.advantages
    own = ratio * (t.logprobs - t.logprobs.detach()).exp()
    terms = -torch.minimum(own * A, own.clamp(1.0 - c.clip_low, 1.0 + c.clip_high) * A)
    return Surrogate(terms=terms, ratio=ratio, **clip_marks(ratio, A, c))
