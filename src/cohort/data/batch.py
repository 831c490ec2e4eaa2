"""A packed batch: flat streams of tokens, and for each what it may see and what it is worth.

A microbatch is one forward and backward; a minibatch is one optimizer step; a batch is one rollout's worth.
Tensors here live on the CPU; the learner moves them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from cohort.data.layout import Layout
from cohort.data.transfer import put
from cohort.types import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One forward and backward. N = tokens the loss may touch.

    Example: prompt [5, 6], completions [7, 2] and [8, 2], shared: tokens = [5, 6, 7, 8],
    positions = [0, 1, 2, 2], source = [1, 2, 1, 3], targets = [7, 2, 8, 2]: both siblings' first tokens are
    predicted at the prompt's last token, and the last ones, which predict nothing, are no inputs.
    """

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    layout: Layout
    source: Tensor  # [N] where in the stream each target is predicted
    targets: Tensor  # [N]
    segments: Tensor  # [N] which sample of the batch, counted over the batch
    lengths: Tensor  # [N] number of targets of that sample
    group_lengths: Tensor  # [N] number of targets of its group
    advantages: Tensor  # [N]
    sampler_logprobs: Tensor  # [N]
    old_logprobs: Tensor | None = None  # [N]
    ref_logprobs: Tensor | None = None  # [N]

    def to(self, device: torch.device) -> Microbatch:
        """The layout stays: attention takes from it what it needs."""
        held = ((f.name, getattr(self, f.name)) for f in fields(self))
        return replace(self, **{name: put(x, device) for name, x in held if isinstance(x, Tensor)})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """One optimizer step. The counts include samples of zero advantage that were not packed."""

    microbatches: list[Microbatch]
    num_samples: int
    num_tokens: int
    num_prompts: int
    longest: int  # tokens of a packed sample with its prompt: no budget may be smaller
    token_budget: int  # that of these microbatches
    repacked: Callable[[int], list[Microbatch]]  # the same samples in microbatches of another budget


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rollout's worth of updates, and what became of every sample on the way here."""

    minibatches: list[Minibatch]
    counts: dict[str, int] = field(default_factory=dict)  # packed, no_signal, masked, failed, empty, excluded
    samples: list[Sample] = field(default_factory=list)  # all of them: `segments` counts these
