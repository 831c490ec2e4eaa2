"""Sums over the bits of weights: equal if the same numbers are stored, whatever matrices and order they are stored in.

In bfloat16 rounding hides what a canary could see: a matrix of the step before changes log-probabilities by less. An
engine in this process can be asked for the numbers themselves. It may have joined matrices, so only a sum over all is
compared. Numbers in other places leave it as it is; a canary sees that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from cohort.engines.base import Weights

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Numbers that are summed at once: as integers of 64 bits they need four times the memory of bfloat16.
CHUNK = 1 << 24
# Odd, so that products with them lose no bit when they overflow.
FACTOR, OFFSET = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D
MODULUS = 1 << 64
HALF = (1 << 32) - 1


def mix_bits(words: Tensor) -> Tensor:
    """Returns words of 64 bits as other words, in which every bit depends on many. Different words stay different.

    Without it a sum of products would miss changes of highest bits alone: two changes of a sign are 0 modulo 2^64. The
    word 0 stays 0.
    """
    spread = words * FACTOR
    return spread ^ ((spread >> 32) & HALF)


def sum_bits(tensors: Iterable[Tensor]) -> int:
    """Returns a sum over all numbers of the tensors, 0 to 2^64 - 1. A number that is 0 adds nothing.

    >>> sum_bits([torch.ones(3), torch.zeros(2)]) == sum_bits([torch.ones(2), torch.ones(1)])
    True
    """
    total = 0
    for tensor in tensors:
        bits = tensor.detach().flatten().view(INTEGERS[tensor.element_size()])
        for part in bits.split(CHUNK):
            x = mix_bits(part.long())
            total += int((x * (x * FACTOR + OFFSET)).sum())
    return total % MODULUS


class SummedWeights:
    """Weights whose sum is computed while they are read. `total` is that of the tensors that were read so far."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.total = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, tensor)."""
        for name, tensor in self.weights:
            self.total = (self.total + sum_bits([tensor])) % MODULUS
            yield name, tensor


def sum_parameters(worker: Any) -> int:
    """Returns the sum over all weights of a vLLM worker's model, in the process of that worker."""
    return sum_bits(worker.get_model().parameters())
