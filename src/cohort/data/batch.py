"""A packed batch: flat streams of tokens, and for each what it may see and what it is worth.

A microbatch is one forward and backward; a minibatch is one optimizer step; a batch is one rollout's worth.
Tensors here live on the CPU; the learner moves them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Segments of similar length attended in one call: b segments of Lq queries over Lk keys, padded.

    Query i of segment s sees keys 0 .. offsets[s] + i. A completion's keys are its prompt and itself with
    offset = prompt length; a prompt's keys are itself with offset 0. Padding repeats an arbitrary token: padded
    keys lie beyond every real query's reach, padded queries are never read.
    """

    queries: Tensor  # [b, Lq] indices into the stream
    keys: Tensor  # [b, Lk] indices into the stream
    offsets: Tensor  # [b]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Who sees whom in a stream, without a mask over all pairs."""

    blocks: list[Block]
    order: Tensor  # [T] row of each token in the blocks' outputs laid end to end


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
    advantages: Tensor  # [N]
    sampler_logprobs: Tensor  # [N]
    old_logprobs: Tensor | None = None  # [N]
    ref_logprobs: Tensor | None = None  # [N]

    def to(self, device: torch.device) -> Microbatch:
        def moved(x: object) -> object:
            return x.to(device) if isinstance(x, Tensor) else x

        layout = Layout(
            blocks=[Block(**{f.name: moved(getattr(b, f.name)) for f in fields(b)}) for b in self.layout.blocks],  # type: ignore[arg-type]
            order=self.layout.order.to(device),
        )
        values = {f.name: moved(getattr(self, f.name)) for f in fields(self)}
        return Microbatch(**{**values, "layout": layout})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """One optimizer step. The counts include samples of zero advantage that were not packed."""

    microbatches: list[Microbatch]
    num_samples: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rollout's worth of updates, and what became of every sample on the way here."""

    minibatches: list[Minibatch]
    counts: dict[str, int] = field(default_factory=dict)  # packed, no_signal, masked, failed, empty, excluded
