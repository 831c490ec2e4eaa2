"""A batch as it is sent to a learner, and the minibatches and microbatches that the learner makes of it.

A `Batch` has one step's samples as plain arrays. It shares no record with other code and holds no function, so it can
be sent to another process. The learner cuts it into minibatches (one optimizer step each) and these into microbatches
(one forward and backward each): `cohort.data.pack`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cohort.data.layout import Layout
from cohort.data.transfer import copy_to_device
from cohort.serialize import record
from cohort.types import SampleId

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """This rank's share of the denominators of one minibatch. Samples without gradient count too: see `make_batch`."""

    num_samples: int
    num_tokens: int
    num_prompts: int
    num_first_tokens: int = 0  # the part of `num_tokens` in the first sample of each group: the better one of a pair


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """S samples of G prompts for M optimizer steps. Only samples that train are stored; `counts` has others too.

    Samples are ordered by minibatch and within it by group. The position of a sample in this order is its number;
    microbatches refer to it by that number (`Microbatch.segments`), other code by its id.
    """

    ids: list[SampleId]  # [S] unique
    group: list[int]  # [S] index into `prompts`
    minibatch: list[int]  # [S]
    prompts: list[Ints]  # [G] token ids; also of groups without stored samples
    tokens: list[Ints]  # [S] of [T]: token ids after the prompt
    targets: list[Ints]  # [S] of [N]: indices into [T] of the tokens that the loss may touch
    advantages: list[Floats]  # [S] of [T]
    sampler_logprobs: list[Floats]  # [S] of [T]
    old_logprobs: list[Floats | None]  # [S] of [T]; None = the learner computes them
    ref_logprobs: list[Floats | None]  # [S] of [T]; None = there is no reference
    counts: list[Counts]  # [M]
    # How many samples were packed, masked, empty and so on. Samples that are not stored here count too.
    fates: dict[str, int] = field(default_factory=dict)
    # Whether a group's samples must be in one microbatch, the better ones first, because their loss compares them.
    whole_groups: bool = False

    @property
    def num_minibatches(self) -> int:
        """The number M of minibatches, which is the number of optimizer steps per epoch."""
        return len(self.counts)

    def sample_numbers(self, minibatch: int) -> list[int]:
        """Returns the numbers of the samples in the minibatch with index `minibatch`, ascending."""
        return [n for n, m in enumerate(self.minibatch) if m == minibatch]


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Input of one forward and backward: T tokens in a packed stream, and the N targets that they predict.

    Tensors are made on the CPU; the learner moves them.

    Example: prompt [5, 6] with completions [7, 2] and [8, 2], the prompt shared: tokens = [5, 6, 7, 8],
    positions = [0, 1, 2, 2], source = [1, 2, 1, 3], targets = [7, 2, 8, 2]. The first tokens of both siblings are
    predicted at the prompt's last token. The last tokens predict nothing, so they are no inputs.
    """

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    layout: Layout
    source: Tensor  # [N] index into the packed stream of the token that predicts each target
    targets: Tensor  # [N]
    segments: Tensor  # [N] the number of the target's sample in the batch
    lengths: Tensor  # [N] number of targets of that sample
    group_lengths: Tensor  # [N] number of targets of its group
    advantages: Tensor  # [N]
    sampler_logprobs: Tensor  # [N]
    num_samples: int  # that the targets belong to
    old_logprobs: Tensor | None = None  # [N]
    ref_logprobs: Tensor | None = None  # [N]

    def to(self, device: torch.device) -> Microbatch:
        """Returns a microbatch with all tensors on `device`. The tensors of this one must be on the host.

        Where `device` is the CPU the tensors are shared, not copied. The layout is always shared: attention copies what
        it needs of it.
        """
        tensors: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                tensors[f.name] = copy_to_device(value, device)
        return replace(self, **tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """The part of a batch for one optimizer step, cut into microbatches."""

    batch: Batch
    index: int  # among the batch's minibatches
    microbatches: list[Microbatch]
    share_prompts: bool  # whether a group's prompt is computed once, where that saves enough tokens
    longest_sample: int  # tokens of its longest sample (or whole group) with prompt: no token budget may be smaller

    @property
    def counts(self) -> Counts:
        """The numbers of samples, tokens and prompts of this minibatch on this rank.

        The loss is divided by sums of these numbers over all ranks. Samples that are not packed may count: see
        `make_batch`.
        """
        return self.batch.counts[self.index]

    @property
    def num_inputs(self) -> int:
        """The number of tokens in all microbatches together: what one forward pass over the minibatch computes."""
        return sum(len(m.tokens) for m in self.microbatches)

    @property
    def largest_microbatch(self) -> int:
        """The number of tokens of the largest microbatch; 0 = there is no microbatch."""
        return max((len(m.tokens) for m in self.microbatches), default=0)
