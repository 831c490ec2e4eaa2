"""Supervised fine-tuning as a loss: maximise the log-probability of the target tokens, one global token mean."""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.inputs import LossInputs
from cohort.algos.tally import Tally


class Imitation:
    """Cross-entropy on target tokens; a `Loss`, without advantages."""

    per_token = True
    has_ratio = False

    def weigh(self, lengths: Lengths, totals: Totals) -> Tensor:
        return torch.full_like(lengths.sample, 1.0 / totals.num_tokens, dtype=torch.float64)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        loss = -(inputs.weights * inputs.logprobs).sum()
        tally = Tally().sum("tokens", float(inputs.logprobs.numel())).mean("loss", -inputs.logprobs)
        return loss, tally.mean("entropy", inputs.entropy)
