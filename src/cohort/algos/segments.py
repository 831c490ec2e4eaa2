"""Sums and means over the tokens of each sample, on flat vectors in which the samples follow each other."""

from __future__ import annotations

import torch
from torch import Tensor


def number_segments(segments: Tensor) -> Tensor:
    """Returns the sample numbers [T] replaced by 0, 1, 2, ... in the order in which the samples come.

    The tokens of a sample must follow each other. The GPU is not asked how many samples there are, so the host never
    waits.

    >>> number_segments(torch.tensor([7, 7, 2, 9, 9]))
    tensor([0, 0, 1, 2, 2])
    """
    begins = torch.ones_like(segments)
    begins[1:] = segments[1:] != segments[:-1]
    return begins.cumsum(0) - 1


def segment_sum(values: Tensor, segments: Tensor) -> Tensor:
    """Returns a vector [T] with, at every token, the sum of `values` over all tokens of its sample; differentiable.

    `segments` [T] has the number of each token's sample; the tokens of a sample must follow each other.

    >>> segment_sum(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([3, 3, 8]))
    tensor([3., 3., 5.])
    """
    index = number_segments(segments)
    # There are at most as many samples as tokens, so a vector of the same length has room for all sums.
    return torch.zeros_like(values).index_add(0, index, values).index_select(0, index)


def segment_mean(values: Tensor, segments: Tensor) -> Tensor:
    """Returns a vector [T] with, at every token, the mean of `values` over all tokens of its sample; differentiable.

    `segments` [T] has the number of each token's sample; the tokens of a sample must follow each other.
    """
    return segment_sum(values, segments) / segment_sum(torch.ones_like(values), segments)
