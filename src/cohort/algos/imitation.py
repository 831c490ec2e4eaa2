"""The loss of supervised fine-tuning: it maximises the log-probability of target tokens, in one global token mean."""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.inputs import LossInputs
from cohort.algos.tally import Tally


class Imitation:
    """Cross-entropy on target tokens, as a `Loss`. It uses no advantages."""

    per_token = True
    has_ratio = False
    whole_groups = False

    def weigh_tokens(self, lengths: Lengths, totals: Totals) -> Tensor:
        """Returns the same token weight [N] for every token: one over the number of target tokens of all ranks."""
        return torch.full_like(lengths.sample, 1.0 / totals.num_tokens, dtype=torch.float64)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        """Returns the sum over tokens of -log p times token weight (0-d), and metrics (tokens, loss, entropy)."""
        loss = -(inputs.weights * inputs.logprobs).sum()
        tally = Tally().add_sum("tokens", float(inputs.logprobs.numel())).add_mean("loss", -inputs.logprobs)
        return loss, tally.add_mean("entropy", inputs.entropy)
