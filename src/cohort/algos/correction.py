"""Importance weights for tokens that another policy drew: an older one, or the engine's slightly different one.

The weight is the policy at the start of the step over the one that acted, from the log-probabilities both reported.
Times the clipped ratio of the step it makes PPO decoupled (Hilton et al. 2021, arXiv:2110.00641): the bound is on how
far the step moves, not on how old its data are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.algos.segments import segment_mean, segment_sum
from cohort.config.algos import CorrectionConfig


@torch.no_grad()
def importance(old_logprobs: Tensor, sampler_logprobs: Tensor, segments: Tensor, level: str) -> Tensor:
    """[T] exp(old - sampler) of the token, or of its whole sample, or that to the power of 1 / length.

    >>> old, sampler = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -2.0])
    >>> importance(old, sampler, torch.tensor([0, 0]), "sequence").log()
    tensor([1.5000, 1.5000])
    """
    log_weight = old_logprobs - sampler_logprobs
    if level == "sequence":
        log_weight = segment_sum(log_weight, segments)
    elif level == "geometric":
        log_weight = segment_mean(log_weight, segments)
    return log_weight.exp()


def corrected(weight: Tensor, c: CorrectionConfig) -> Tensor:
    """Held within the bounds (truncated importance sampling), 0 outside them (masked; IcePop's double bound), or as is.

    >>> corrected(torch.tensor([0.1, 1.0, 9.0]), CorrectionConfig(kind="truncate", bounds=(0.5, 2.0)))
    tensor([0.5000, 1.0000, 2.0000])
    >>> corrected(torch.tensor([0.1, 1.0, 9.0]), CorrectionConfig(kind="mask", bounds=(0.5, 2.0)))
    tensor([0., 1., 0.])
    """
    low, high = c.bounds
    if c.kind == "none":
        return weight
    if c.kind == "truncate":
        return weight.clamp(low, high)
    return torch.where((weight < low) | (weight > high), torch.zeros_like(weight), weight)
