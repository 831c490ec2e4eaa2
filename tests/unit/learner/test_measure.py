"""What a learner measures without training: on a GPU the backend copies a microbatch there, and nobody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.algos.imitation import Imitation
from cohort.algos.inputs import LossInputs
from cohort.algos.preferences import PreferenceLoss
from cohort.algos.tally import Tally
from cohort.config.preferences import Sigmoid
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.data import batch as batch_module
from cohort.data.pack import make_batch
from cohort.learner.local import LocalLearner
from tests.helpers.decoders_and_groups import random_groups, small_decoder


def storages(values: Any) -> set[int]:
    """Returns where the tensors among these values are stored."""
    return {v.untyped_storage().data_ptr() for v in values if isinstance(v, Tensor) and v.numel()}


@pytest.mark.parametrize("loss_class", [Imitation, PreferenceLoss])
def test_what_was_copied_to_the_device_is_neither_copied_again_nor_in_the_loss(loss_class, monkeypatch):
    # A stand-in for a GPU: its copies are other tensors, and none of them may be copied there again.
    copies: list[Tensor] = []

    def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
        assert not storages([values]) & storages(copies), "a tensor of the device is copied to it"
        copies.append(values.clone())
        return copies[-1]

    monkeypatch.setattr(batch_module, "copy_to_device", copy_to_device)
    loss = Imitation() if loss_class is Imitation else PreferenceLoss(Sigmoid())
    found: list[LossInputs] = []
    inner = loss.loss

    def watched(inputs: LossInputs) -> tuple[Tensor, Tally]:
        found.append(inputs)
        return inner(inputs)

    monkeypatch.setattr(loss, "loss", watched)
    groups = random_groups(3, 2)
    batch = make_batch(groups, whole_groups=loss.whole_groups)
    learner = LocalLearner(small_decoder(), LearnerConfig(token_budget=32), OptimConfig(), num_updates=1)
    metrics = learner.measure(batch, loss)
    assert copies and len(found) > 1 and metrics["loss"] > 0
    for inputs in found:
        # Log-probabilities come back on the host, and everything that they meet must be there too.
        assert not storages(getattr(inputs, name) for name in LossInputs.__slots__) & storages(copies)
