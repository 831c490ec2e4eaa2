"""LoRA adapters with the GPU engine: captured graphs use every merge, and gradients equal those on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.device import DEVICE, only_gpu

# isort: split

from cohort.algos.algorithm import build_algorithm
from cohort.config.schema import GRPO, LearnerConfig, LoraConfig, OptimConfig
from cohort.data.pack import make_batch
from cohort.engines.base import sample
from cohort.engines.native.cuda.engine import GraphEngine
from cohort.engines.native.engine import NativeEngine
from cohort.learner.local import LocalLearner
from cohort.loops.learning import annotate
from cohort.models.lora import Adapters
from tests.helpers.decoders_and_groups import pack_groups, random_groups, small_decoder
from tests.helpers.engine_conformance import request, spell

SMALL = {"head_dim": 32, "num_layers": 1, "num_heads": 3, "num_kv_heads": 1}


def make_learner(dtype: torch.dtype, device: torch.device, lora: LoraConfig, **shape) -> LocalLearner:
    """Returns a learner of a small decoder with adapters that have random factors. `shape` changes its config."""
    decoder = small_decoder(std=0.15, **shape).to(dtype).to(device)
    adapters = Adapters(decoder, lora)
    generator = torch.Generator().manual_seed(1)
    for tensor in adapters.tensors().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    adapters.merge()
    return LocalLearner(decoder, LearnerConfig(), OptimConfig(lr=0.1), num_updates=1, adapters=adapters)


@pytest.mark.parametrize("base", ["keep", "nf4"])
def test_an_update_of_adapters_is_seen_without_a_copy_and_graphs_stay_valid(base):
    learner = make_learner(torch.float32, DEVICE, LoraConfig(rank=2, base=base), **SMALL)
    model = learner.decoder
    engine = GraphEngine(model, spell, slots=2, max_context=200, window=4)
    before = sample(engine, [request()])["0/0"].tokens
    assert engine.graphs is not None
    captured, addresses = engine.graphs.num_captures, [p.data_ptr() for p in model.parameters()]
    # The decoder has the weights of the reference meanwhile. Afterwards the adapters are merged again.
    annotate(learner, random_groups(), {"ref"})
    engine.load(learner.weights(), version=1)
    assert sample(engine, [request()])["0/0"].tokens == before
    metrics = learner.update(make_batch(random_groups()), build_algorithm(GRPO(), 16)).metrics
    assert metrics["updates/done"] == 1.0
    engine.load(learner.weights(), version=2)
    after = sample(engine, [request()])["0/0"].tokens
    assert after == sample(NativeEngine(model, spell, slots=4, max_context=200), [request()])["0/0"].tokens != before
    assert (engine.graphs.num_captures, [p.data_ptr() for p in model.parameters()]) == (captured, addresses)


@only_gpu
@pytest.mark.parametrize("base", ["keep", "nf4"])
def test_weights_and_gradients_equal_those_on_a_cpu(base):
    lora = LoraConfig(rank=3, alpha=5.0, base=base)
    on_gpu, on_cpu = (make_learner(torch.float32, device, lora) for device in (DEVICE, torch.device("cpu")))
    for p, q in zip(on_gpu.decoder.parameters(), on_cpu.decoder.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-6, atol=1e-6)
    algo = build_algorithm(GRPO(), 16)
    for learner in (on_gpu, on_cpu):
        learner.forward_backward(pack_groups(random_groups(), 1000).minibatches[0], algo)
    for (name, p), q in zip(on_gpu.adapters.named_parameters(), on_cpu.adapters.parameters(), strict=True):
        assert (p.grad.cpu() - q.grad).abs().max() <= 1e-4 * q.grad.abs().max(), name


@only_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_holding_the_base_weights_changes_no_bit_afterwards(dtype):
    learner = make_learner(dtype, DEVICE, LoraConfig(rank=3))
    merged = [p.clone() for p in learner.decoder.parameters()]
    with learner.adapters.hold_base():
        base = small_decoder(std=0.15).to(dtype).to(DEVICE)
        assert all(torch.equal(p, b) for p, b in zip(learner.decoder.parameters(), base.parameters(), strict=True))
    assert all(torch.equal(p, m) for p, m in zip(learner.decoder.parameters(), merged, strict=True))
