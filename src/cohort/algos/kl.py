"""Estimators of the KL divergence to another policy, from the logprobs of sampled tokens (Schulman, 2020).

With d = logprobs - other_logprobs, on tokens that the policy drew:

- k1 = d is unbiased and can be negative.
- k2 = d^2 / 2 is never negative, has low variance and is biased.
- k3 = exp(-d) - 1 + d is never negative and unbiased.
- abs = |d| is not a KL divergence, but bounds how far a token's probability moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cohort.config.algo_sections import Estimator


def kl_per_token(logprobs: Tensor, other_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """Returns an estimate of KL(policy || other) at each token [T], differentiable in `logprobs`.

    It assumes that the policy with `logprobs` drew the tokens. `estimator` is "k1", "k2", "k3" or "abs".

    >>> kl_per_token(torch.tensor([-1.0]), torch.tensor([-1.5]), "k2")
    tensor([0.1250])
    """
    d = logprobs - other_logprobs  # [T]
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d * d
    if estimator == "abs":
        return d.abs()
    # expm1, because exp(-d) - 1 loses every digit of k3 (about d^2 / 2) where d is small.
    return torch.expm1(-d) + d


def kl_of_sample(logprobs: Sequence[float], other_logprobs: Sequence[float], estimator: Estimator) -> float:
    """Returns the sum over a sample's tokens of the KL estimates (see `kl_per_token`), as a number without gradient.

    It is for a KL that is subtracted from the reward.

    >>> kl_of_sample([-1.0, -2.0], [-1.5, -1.75], "k1")
    0.25
    """
    policy = torch.tensor(logprobs, dtype=torch.float64)  # [T]
    return float(kl_per_token(policy, torch.tensor(other_logprobs, dtype=torch.float64), estimator).sum())
