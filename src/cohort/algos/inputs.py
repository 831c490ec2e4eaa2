"""What a loss sees: flat vectors over the sampled tokens of one microbatch. No logits, no model, no ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """The T sampled tokens of one microbatch. The learner takes the gradient on `logprobs` and `entropy`.

    The entropy has no gradient (autograd reports it as unused) when the algorithm has no entropy bonus.
    """

    logprobs: Tensor  # [T] current policy, at the sampling temperature; requires grad
    entropy: Tensor  # [T] of the current policy's next-token distribution; requires grad
    old_logprobs: Tensor | None  # [T] the learner's own at the step's beginning; None = nothing moved since, ratio 1
    ref_logprobs: Tensor | None  # [T] reference policy; None = no KL to it
    sampler_logprobs: Tensor  # [T] what the engine reported: for the gap metric and the correction
    advantages: Tensor  # [T]
    weights: Tensor  # [T] aggregation weight, the global denominators included; 0 = out of the loss
    segments: Tensor  # [T] int, index of the sample the token belongs to
    whole: bool = False  # no weight is 0: known without a look, for which a GPU would have to be waited for

    def in_loss(self) -> LossInputs:
        """Only the tokens with a weight: 0 times an infinite ratio of a masked token would be NaN.

        >>> import torch
        >>> x = torch.arange(3.0)
        >>> inputs = LossInputs(
        ...     logprobs=x, entropy=x, old_logprobs=None, ref_logprobs=None, sampler_logprobs=x, advantages=x,
        ...     weights=torch.tensor([1.0, 0.0, 1.0]), segments=torch.tensor([0, 1, 1]))
        >>> inputs.in_loss().segments
        tensor([0, 1])
        """
        if self.whole:
            return self
        keep = self.weights.nonzero().squeeze(1)  # [K]
        if keep.numel() == self.weights.numel():
            return self
        # index_select, not advanced indexing: its backward is deterministic
        kept: dict[str, Any] = {}
        for f in fields(self):
            vector = getattr(self, f.name)
            kept[f.name] = vector.index_select(0, keep) if isinstance(vector, Tensor) else vector
        return LossInputs(**kept)
