"""Losses that clip the ratio of each token, as PPO does: GRPO, Dr. GRPO, DAPO, Pass@k and REINFORCE++."""

from __future__ import annotations

import torch

from cohort.algos.surrogates import Surrogate, Tokens, clip_marks, surrogate
from cohort.config.algos import GRPO, Clipped


@surrogate("grpo", "dr_grpo", "dapo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline")
def clipped(t: Tokens, c: Clipped) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 at most -dual_clip A (PPO, arXiv:1707.06347)."""
    ratio, A = t.log_ratio.exp(), t.advantages
    terms = -torch.minimum(ratio * A, ratio.clamp(1.0 - c.clip_low, 1.0 + c.clip_high) * A)
    held = clip_marks(ratio, A, c)
    if isinstance(c, GRPO) and c.dual_clip:
        terms = torch.where(A < 0, torch.minimum(terms, -c.dual_clip * A), terms)
        held["high"] |= (ratio > c.dual_clip) & (A < 0)
    return Surrogate(terms=terms, ratio=ratio, **held)
