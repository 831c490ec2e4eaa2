"""The inputs of a loss: flat vectors over the sampled tokens of one microbatch. No logits, no model, no ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from cohort.algos.aggregate import Totals


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """Vectors over the T sampled tokens of one microbatch. The learner takes the gradient on `logprobs` and `entropy`.

    When the algorithm has no entropy bonus, the entropy has no gradient (autograd reports it as unused).
    """

    logprobs: Tensor  # [T] current policy, at the sampling temperature; requires grad
    entropy: Tensor  # [T] of the current policy's next-token distribution; requires grad
    old_logprobs: Tensor | None  # [T] of the learner at the step's start; None = the weights have not moved, ratio 1
    ref_logprobs: Tensor | None  # [T] reference policy; None = no KL to it
    sampler_logprobs: Tensor  # [T] reported by the engine: for the gap metric and the correction
    advantages: Tensor  # [T]
    weights: Tensor  # [T] token weights, with the global denominators inside; 0 = out of the loss
    segments: Tensor  # [T] int, index of the sample that the token belongs to
    # True = no token weight is 0. The caller knows it on the host: a check here would have to wait for the GPU.
    all_in_loss: bool = False
    # For losses that compare whole samples. Their inputs are never pieces of a microbatch.
    totals: Totals | None = None  # the denominators over all ranks
    num_samples: int = 0  # in this microbatch; the tokens of a sample follow each other

    def in_loss(self) -> LossInputs:
        """Returns the inputs with only the tokens whose token weight is not 0; itself if that is all of them.

        With `all_in_loss` the weights are not looked at. A weight of 0 is not enough to remove a masked token: 0 times
        its ratio, if that is infinite, would be NaN.

        >>> import torch
        >>> x = torch.arange(3.0)
        >>> inputs = LossInputs(
        ...     logprobs=x, entropy=x, old_logprobs=None, ref_logprobs=None, sampler_logprobs=x, advantages=x,
        ...     weights=torch.tensor([1.0, 0.0, 1.0]), segments=torch.tensor([0, 1, 1]))
        >>> inputs.in_loss().segments
        tensor([0, 1])
        """
        if self.all_in_loss:
            return self
        keep = self.weights.nonzero().squeeze(1)  # [K]
        if keep.numel() == self.weights.numel():
            return self
        # index_select instead of advanced indexing, because its backward is deterministic.
        kept: dict[str, Any] = {}
        for f in fields(self):
            vector = getattr(self, f.name)
            kept[f.name] = vector.index_select(0, keep) if isinstance(vector, Tensor) else vector
        return LossInputs(**kept)
