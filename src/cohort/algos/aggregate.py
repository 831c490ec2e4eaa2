"""How per-token losses become one number: a weight for every token, the global denominators inside.

The loss is then a plain sum, and nothing that only cuts a sum into pieces (microbatches, packs, ranks) can
change it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregate = Literal["token", "sequence", "constant"]


def token_weights(
    lengths: Tensor, mode: Aggregate, *, num_tokens: float, num_samples: float, max_tokens: int
) -> Tensor:
    """The weight of tokens whose samples have `lengths` sampled tokens; 0 where a sample has none. float64.

    The denominators are those of one optimizer step over all ranks, counted before the first backward:
    `num_tokens` sampled tokens of unmasked samples, `num_samples` scored samples (masked and empty ones too).

    >>> lengths = torch.tensor([1, 4])
    >>> token_weights(lengths, "token", num_tokens=5, num_samples=2, max_tokens=8).tolist()
    [0.2, 0.2]
    >>> token_weights(lengths, "sequence", num_tokens=5, num_samples=2, max_tokens=8).tolist()
    [0.5, 0.125]
    >>> token_weights(lengths, "constant", num_tokens=5, num_samples=2, max_tokens=8).tolist()
    [0.0625, 0.0625]
    """
    if mode == "token":
        divisor = torch.full_like(lengths, num_tokens, dtype=torch.float64)
    elif mode == "sequence":
        divisor = num_samples * lengths.double()
    else:
        divisor = torch.full_like(lengths, num_samples * max_tokens, dtype=torch.float64)
    return torch.where(lengths > 0, 1.0 / divisor, torch.zeros_like(divisor))
