"""REINFORCE and RLOO: the log-probability times the advantage, without a clip."""

from __future__ import annotations

from cohort.algos.surrogates import Surrogate, Tokens, surrogate
from cohort.config.algos import Policy


@surrogate("reinforce", "rloo")
def score_function(t: Tokens, c: Policy) -> Surrogate:
    """-A log p, weighted with the detached ratio when the policy has moved since it acted."""
    ratio = t.log_ratio.detach().exp()
    return Surrogate(terms=-ratio * t.advantages * t.logprobs, ratio=ratio)
