"""Importance ratios, which correct for tokens drawn by another policy than the one at the start of the step.

That policy may be an older one, or the engine's version of the same one, which differs slightly. The importance ratio
(also called importance weight) is p_old / p_sampler: the policy at the start of the step over the policy that drew the
token, from the log-probabilities that both reported. Multiplied with the clipped ratio of the step it makes PPO
decoupled (Hilton et al. 2021, arXiv:2110.00641): the clip then bounds how far the step moves, not how old its data are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.algos.segments import segment_mean, segment_sum
from cohort.config.algo_sections import CorrectionConfig


@torch.no_grad()
def importance_ratios(old_logprobs: Tensor, sampler_logprobs: Tensor, segments: Tensor, level: str) -> Tensor:
    """Returns the importance ratios p_old / p_sampler [T], without gradient.

    Level "token": the ratio of each token. "sequence": the product over the token's sample. "geometric": the geometric
    mean over the token's sample. `segments` [T] has the number of each token's sample, whose tokens must follow each
    other; "token" does not use it.

    >>> old, sampler = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -2.0])
    >>> importance_ratios(old, sampler, torch.tensor([0, 0]), "sequence").log()
    tensor([1.5000, 1.5000])
    """
    log_ratio = old_logprobs - sampler_logprobs
    if level == "sequence":
        log_ratio = segment_sum(log_ratio, segments)
    elif level == "geometric":
        log_ratio = segment_mean(log_ratio, segments)
    return log_ratio.exp()


def bound_ratios(ratios: Tensor, c: CorrectionConfig) -> Tensor:
    """Returns the importance ratios [T] limited to `c.bounds`, in the way of `c.kind`.

    Kind "truncate" clamps them to the bounds (truncated importance sampling). "mask" sets those outside to 0 (IcePop).
    "none" returns them unchanged.

    >>> bound_ratios(torch.tensor([0.1, 1.0, 9.0]), CorrectionConfig(kind="truncate", bounds=(0.5, 2.0)))
    tensor([0.5000, 1.0000, 2.0000])
    >>> bound_ratios(torch.tensor([0.1, 1.0, 9.0]), CorrectionConfig(kind="mask", bounds=(0.5, 2.0)))
    tensor([0., 1., 0.])
    """
    low, high = c.bounds
    if c.kind == "none":
        return ratios
    if c.kind == "truncate":
        return ratios.clamp(low, high)
    return torch.where((ratios < low) | (ratios > high), torch.zeros_like(ratios), ratios)
