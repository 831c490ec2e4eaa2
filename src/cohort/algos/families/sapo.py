"""SAPO: a smooth gate in place of a clip."""

from __future__ import annotations

import torch

from cohort.algos.surrogates import Surrogate, Tokens, surrogate
from cohort.config.algos import SAPO


@surrogate("sapo")
def softly_gated(t: Tokens, c: SAPO) -> Surrogate:
    """-4 / tau sigmoid(tau (r - 1)) A, tau by the sign of A: slope 1 at r = 1, fading on both sides."""
    ratio = t.log_ratio.exp()
    tau = torch.where(t.advantages > 0, torch.full_like(ratio, c.tau_pos), torch.full_like(ratio, c.tau_neg))
    return Surrogate(terms=-torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau * t.advantages, ratio=ratio)
