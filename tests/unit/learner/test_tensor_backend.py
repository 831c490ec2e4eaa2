"""The backend of slices, as far as one process can test it."""

from __future__ import annotations

import math

import pytest
import torch

from cohort.config.schema import LoraConfig, OptimConfig
from cohort.errors import ConfigError, RunError
from cohort.learner.backend import make_backend
from cohort.learner.tensor_backend import (
    TensorBackend,
    cut_state,
    grad_norm,
    make_tensor_backend,
    tensor_bytes_per_microbatch,
)
from cohort.models.lora import Adapters
from cohort.models.tensor import shard_decoder
from cohort.world import World
from tests.helpers.decoders_and_groups import pack_groups, random_groups, small_config, small_decoder


class EqualRanks(World):
    """A rank of `size` that all have the same numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(self.size)


def test_the_norm_counts_slices_once_each_and_common_tensors_once():
    grads = {"qkv": torch.tensor([[3.0, 0.0]]), "norm.weight": torch.tensor([2.0])}
    assert grad_norm(grads, EqualRanks(4), {"norm.weight"}) == pytest.approx(math.sqrt(4 * 9 + 4))
    assert grad_norm({}, EqualRanks(4), set()) == 0.0
    assert math.isnan(grad_norm({"qkv": torch.tensor([math.nan])}, EqualRanks(2), set()))


def test_one_rank_with_all_slices_is_one_process():
    micro = pack_groups(random_groups(), 200).minibatches[0].microbatches[0]
    decoder = small_decoder(torch.float64)
    whole = make_backend(decoder, OptimConfig(), None)
    sliced = TensorBackend(shard_decoder(decoder, World()), OptimConfig())
    assert not sliced.optimizer.overlaps, "its backward sums over other ranks already"
    for backend in (whole, sliced):
        backend.backward(micro, 0.7, lambda rows, logprobs, entropy: (logprobs, entropy), per_token=True)
    expected = {name: m.grad for name, m in whole.optimizer.masters.items()}
    for name, m in sliced.optimizer.masters.items():
        assert (m.grad - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max()


def test_a_loss_without_gradient_is_not_carried_further():
    micro = pack_groups(random_groups(), 200).minibatches[0].microbatches[0]
    backend = TensorBackend(shard_decoder(small_decoder(), World()), OptimConfig())
    backend.backward(micro, 1.0, lambda rows, logprobs, entropy: (logprobs * 0, None), per_token=True)
    assert backend.decoder.layers[0].qkv.grad is None


def test_adapters_and_other_divisions_are_refused():
    adapters = Adapters(small_decoder(), LoraConfig(rank=2))
    with pytest.raises(ConfigError, match=r"learner\.tensor = 1 .* --learner\.lora\.rank 0") as refused:
        make_tensor_backend(small_decoder(), OptimConfig(), adapters, "none", World())
    assert "\n" not in str(refused.value)
    for shard in ("optimizer", "full"):
        with pytest.raises(ConfigError, match=rf"learner\.shard = {shard}: set --learner\.shard none"):
            make_tensor_backend(small_decoder(), OptimConfig(), None, shard, World())


def test_a_state_of_another_shape_is_refused():
    decoder = shard_decoder(small_decoder(), World())
    with pytest.raises(RunError, match=r'"exp_avg/norm.weight" .* shape \[5\], and the model needs \[32\]'):
        cut_state(decoder, "exp_avg/norm.weight", torch.zeros(5))


def test_one_rank_sends_nothing():
    assert tensor_bytes_per_microbatch(small_config(), 10, 5, 1, dtype=torch.float32) == {}


def test_bytes_of_a_bf16_model_are_those_of_its_fp32_stream():
    found = [
        tensor_bytes_per_microbatch(small_config(), 10, 5, 2, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    ]
    # 1 + 4 x 2 layers sums of 10 tokens and one of 5 targets, of 32 numbers each; three numbers per target.
    assert found == [{"sum": (9 * 10 + 5) * 32 * 4, "join": 3 * 5 * 4}] * 2
