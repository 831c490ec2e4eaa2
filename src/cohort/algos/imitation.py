"""Supervised fine-tuning as a loss: maximise the log-probability of the target tokens, one global token mean."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cohort.algos.inputs import LossInputs
from cohort.algos.tally import Tally


class Imitation:
    """Cross-entropy on target tokens; a `Loss`, without advantages."""

    per_token: ClassVar[bool] = True

    def weigh(self, lengths: Tensor, num_tokens: float, num_samples: float) -> Tensor:
        return torch.full(lengths.shape, 1.0 / num_tokens, dtype=torch.float64, device=lengths.device)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        loss = -(inputs.weights * inputs.logprobs).sum()
        tally = Tally().sum("tokens", float(inputs.logprobs.numel())).mean("loss", -inputs.logprobs)
        return loss, tally.mean("entropy", inputs.entropy)
