"""SAPO: a smooth gate in place of a clip."""

from __future__ import annotations

import torch

from cohort.algos.surrogates import Surrogate, Tokens, surrogate
from cohort.config.algos import SAPO


@surrogate("sapo")
def sapo_surrogate(t: Tokens, c: SAPO) -> Surrogate:
    """Returns the loss terms -(4 / tau) sigmoid(tau (r - 1)) A of the tokens [T].

    r is the ratio of new to old policy, A the advantage; tau is tau_pos where A > 0 and tau_neg elsewhere. The
    derivative by r is -A at r = 1, as in PPO, and fades smoothly as r moves away on either side.
    """
    ratio = t.log_ratio.exp()
    tau = torch.where(t.advantages > 0, torch.full_like(ratio, c.tau_pos), torch.full_like(ratio, c.tau_neg))
    return Surrogate(terms=-torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau * t.advantages, ratio=ratio)
