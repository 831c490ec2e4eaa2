"""Token weights: how the losses of tokens become one number. The global denominators are inside the token weights.

The loss is then a plain sum. Microbatches, packs and ranks only cut this sum into pieces, so they cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.config.algos import Aggregate


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Counts of one optimizer step over all ranks, made before the first backward."""

    num_tokens: float  # target tokens of unmasked samples, in groups that count (`Fate.is_counted`)
    num_samples: float  # scored samples of groups that count, masked and empty ones too
    num_prompts: float  # groups that count, with at least one scored sample
    num_first_tokens: float = 0.0  # the part of `num_tokens` in the first sample of each group: the better of a pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """For every token [N] of a microbatch, how many tokens of its sample and of its group are in the loss."""

    sample: Tensor  # [N] of the token's sample
    group: Tensor  # [N] of the token's group


def token_weights(lengths: Lengths, mode: Aggregate, totals: Totals, max_tokens: int) -> Tensor:
    """Returns the token weights [N], float64: the factor of each token's loss term in the sum over all tokens.

    `mode` is the setting algo.aggregate. `totals` are the denominators over all ranks. `max_tokens` is the longest
    completion; only "constant" uses it. The weight is 0 for a token whose sample has length 0.

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
        # One mean over all tokens.
        divisor = torch.full_like(size, totals.num_tokens)
    elif mode == "sequence":
        # The mean over samples of each sample's token mean.
        divisor = totals.num_samples * size
    elif mode == "prompt":
        # The mean over prompts of each group's token mean.
        divisor = totals.num_prompts * lengths.group.double()
    else:
        # The mean over samples of each sample's token sum, divided by a constant length.
        divisor = torch.full_like(size, totals.num_samples * max_tokens)
    return torch.where(size > 0, 1.0 / divisor, torch.zeros_like(divisor))
