"""Sums over the tokens of each sample, on flat vectors whose samples lie end to end."""

from __future__ import annotations

import torch
from torch import Tensor


def places(segments: Tensor) -> Tensor:
    """[T] the samples' numbers in the order they come, from 0: nobody waits for a GPU to count them.

    >>> places(torch.tensor([7, 7, 2, 9, 9]))
    tensor([0, 0, 1, 2, 2])
    """
    begins = torch.ones_like(segments)
    begins[1:] = segments[1:] != segments[:-1]
    return begins.cumsum(0) - 1


def segment_sum(values: Tensor, segments: Tensor) -> Tensor:
    """[T] for every token the sum over its sample; differentiable.

    >>> segment_sum(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([3, 3, 8]))
    tensor([3., 3., 5.])
    """
    at = places(segments)
    return torch.zeros_like(values).index_add(0, at, values).index_select(0, at)


def segment_mean(values: Tensor, segments: Tensor) -> Tensor:
    """[T] for every token the mean over its sample."""
    return segment_sum(values, segments) / segment_sum(torch.ones_like(values), segments)
