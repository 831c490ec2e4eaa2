"""Losses that clip the ratio of each token, as PPO does: GRPO, DrGRPO, DAPO, Pass@k and REINFORCE++."""

from __future__ import annotations

import torch

from cohort.algos.surrogates import Surrogate, Tokens, mark_clipped, surrogate
from cohort.config.algos import GRPO, Clipped


@surrogate("grpo", "dr_grpo", "dapo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline")
def clipped_surrogate(t: Tokens, c: Clipped) -> Surrogate:
    """Returns the loss terms -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of the tokens [T], as PPO does.

    See arXiv:1707.06347. r is the ratio of new to old policy, A the advantage. A token whose ratio has already moved
    beyond a bound, in the direction that A asks for, has no gradient. With `dual_clip` (a setting of GRPO and DrGRPO; 0
    = off) a term is at most -dual_clip A where A < 0: a bad sample costs no more than that, however large r is.
    """
    ratio, A = t.log_ratio.exp(), t.advantages
    terms = -torch.minimum(ratio * A, ratio.clamp(1.0 - c.clip_low, 1.0 + c.clip_high) * A)
    is_clipped = mark_clipped(ratio, A, c)
    if isinstance(c, GRPO) and c.dual_clip:
        terms = torch.where(A < 0, torch.minimum(terms, -c.dual_clip * A), terms)
        is_clipped["high"] |= (ratio > c.dual_clip) & (A < 0)
    return Surrogate(terms=terms, ratio=ratio, **is_clipped)
