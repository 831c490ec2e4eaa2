"""REINFORCE and RLOO: the log-probability times the advantage, without a clip."""

from __future__ import annotations

from cohort.algos.surrogates import Surrogate, Tokens, surrogate
from cohort.config.algos import Policy


@surrogate("reinforce", "rloo")
def reinforce_surrogate(t: Tokens, c: Policy) -> Surrogate:
    """Returns the loss terms -sg(r) A log p of the tokens [T]; sg means without gradient.

    A is the advantage, r the ratio of new to old policy. r is 1 in the first update of a step. In later ones it
    accounts for how far the policy has moved.
    """
    ratio = t.log_ratio.detach().exp()
    return Surrogate(terms=-ratio * t.advantages * t.logprobs, ratio=ratio)
