"""A batch as it travels, and what a learner makes of it.

`Batch` is what a learner is given: one step's samples as plain arrays. It holds no record that anyone else writes into
and no function, so it can go to another process. The learner cuts it into minibatches (one optimizer step each) and
these into microbatches (one forward and backward each): `cohort.data.pack`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cohort.data.layout import Layout
from cohort.data.transfer import put
from cohort.serialize import record
from cohort.types import SampleId

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """The denominators of one minibatch, on this rank. They include samples of zero advantage, which are not packed."""

    num_samples: int
    num_tokens: int
    num_prompts: int


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """S samples of G prompts for M optimizer steps. Only samples with a gradient are here; `counts` knows the others.

    Samples are ordered by minibatch and within it by group. The number of a sample in this order names it in the
    microbatches (`Microbatch.segments`); its id names it outside.
    """

    ids: list[SampleId]  # [S] unique
    group: list[int]  # [S] index into `prompts`
    minibatch: list[int]  # [S]
    prompts: list[Ints]  # [G] token ids
    tokens: list[Ints]  # [S] of [T]: token ids after the prompt
    targets: list[Ints]  # [S] of [N]: places in [T] of the tokens that the loss may touch
    advantages: list[Floats]  # [S] of [T]
    sampler_logprobs: list[Floats]  # [S] of [T]
    old_logprobs: list[Floats | None]  # [S] of [T]; None = the learner finds them
    ref_logprobs: list[Floats | None]  # [S] of [T]; None = there is no reference
    counts: list[Counts]  # [M]
    fates: dict[str, int] = field(default_factory=dict)  # samples by what became of them, those that are not here too

    @property
    def num_minibatches(self) -> int:
        return len(self.counts)

    def members(self, minibatch: int) -> list[int]:
        """The numbers of a minibatch's samples."""
        return [n for n, m in enumerate(self.minibatch) if m == minibatch]


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One forward and backward. N = tokens the loss may touch. Tensors live on the CPU; the learner moves them.

    Example: prompt [5, 6], completions [7, 2] and [8, 2], shared: tokens = [5, 6, 7, 8],
    positions = [0, 1, 2, 2], source = [1, 2, 1, 3], targets = [7, 2, 8, 2]: both siblings' first tokens are
    predicted at the prompt's last token, and the last ones, which predict nothing, are no inputs.
    """

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    layout: Layout
    source: Tensor  # [N] where in the stream each target is predicted
    targets: Tensor  # [N]
    segments: Tensor  # [N] the number of the token's sample in the batch
    lengths: Tensor  # [N] number of targets of that sample
    group_lengths: Tensor  # [N] number of targets of its group
    advantages: Tensor  # [N]
    sampler_logprobs: Tensor  # [N]
    old_logprobs: Tensor | None = None  # [N]
    ref_logprobs: Tensor | None = None  # [N]

    def to(self, device: torch.device) -> Microbatch:
        """On the device. The layout stays: attention takes from it what it needs."""
        tensors: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                tensors[f.name] = put(value, device)
        return replace(self, **tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """One optimizer step of a batch, cut into microbatches."""

    batch: Batch
    index: int  # among the batch's minibatches
    microbatches: list[Microbatch]
    share: bool  # a group's prompt is computed once where that pays
    longest: int  # tokens of its longest sample with the prompt: no budget may be smaller

    @property
    def counts(self) -> Counts:
        return self.batch.counts[self.index]

    @property
    def num_inputs(self) -> int:
        """Tokens of all its microbatches: what a forward computes."""
        return sum(len(m.tokens) for m in self.microbatches)

    @property
    def largest(self) -> int:
        """Tokens of its largest microbatch."""
        return max((len(m.tokens) for m in self.microbatches), default=0)
