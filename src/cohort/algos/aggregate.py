"""How per-token losses become one number: a weight for every token, the global denominators inside.

The loss is then a plain sum, and nothing that only cuts a sum into pieces (microbatches, packs, ranks) can
change it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.config.algos import Aggregate


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Of one optimizer step over all ranks, counted before the first backward."""

    num_tokens: float  # sampled tokens of unmasked samples
    num_samples: float  # scored samples, masked and empty ones too
    num_prompts: float  # groups with such a sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """For every token [N] of a microbatch: sampled tokens in the loss of its ..."""

    sample: Tensor  # ... sample
    group: Tensor  # ... group


def token_weights(lengths: Lengths, mode: Aggregate, totals: Totals, max_tokens: int) -> Tensor:
    """The weight of each token; 0 where a sample has none. float64.

    >>> lengths = Lengths(sample=torch.tensor([1, 4]), group=torch.tensor([5, 5]))
    >>> totals = Totals(num_tokens=5, num_samples=2, num_prompts=1)
    >>> token_weights(lengths, "token", totals, max_tokens=8).tolist()
    [0.2, 0.2]
    >>> token_weights(lengths, "sequence", totals, max_tokens=8).tolist()
    [0.5, 0.125]
    >>> token_weights(lengths, "prompt", totals, max_tokens=8).tolist()
    [0.2, 0.2]
    >>> token_weights(lengths, "constant", totals, max_tokens=8).tolist()
    [0.0625, 0.0625]
    """
    size = lengths.sample.double()
    if mode == "token":
        divisor = torch.full_like(size, totals.num_tokens)
    elif mode == "sequence":
        divisor = totals.num_samples * size
    elif mode == "prompt":
        divisor = totals.num_prompts * lengths.group.double()
    else:
        divisor = torch.full_like(size, totals.num_samples * max_tokens)
    return torch.where(size > 0, 1.0 / divisor, torch.zeros_like(divisor))
