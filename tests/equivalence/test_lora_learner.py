"""The learner with adapters: its gradient, the reference policy, and which weights a step moves."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from cohort.algos.algorithm import build_algorithm
from cohort.config.algo_sections import KLConfig
from cohort.config.schema import GRPO, BatchConfig, LearnerConfig, LoraConfig, OptimConfig
from cohort.data.pack import make_batch
from cohort.learner.local import LocalLearner
from cohort.loops.learning import annotate
from cohort.models.decoder import hf_views, to_hf_shape
from cohort.models.lora import Adapters
from cohort.recipes.tiny import tiny_lora
from tests.helpers.decoders_and_groups import pack_groups, random_groups, small_decoder
from tests.helpers.small_runs import built_job, run_steps, small_run

LORA = LoraConfig(rank=3, alpha=5.0)


def make_learner(decoder, lora=LORA, budget=1000, **optim):
    """Returns a learner whose adapters are not zero."""
    adapters = Adapters(decoder, lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, p in sorted(adapters.named_parameters()):
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    adapters.merge()
    optim = OptimConfig(**{"lr": 1e-2, **optim})
    return LocalLearner(decoder, LearnerConfig(token_budget=budget), optim, num_updates=10, adapters=adapters)


def gradient(learner, groups, algo, budget=1000, share=True):
    """Returns the gradients of one minibatch, by parameter, and its metrics."""
    annotate(learner, groups, algo.needs() | {"old"})
    tally = learner.forward_backward(pack_groups(groups, budget, share=share).minibatches[0], algo).tally
    return {n: m.grad.clone() for n, m in learner.optimizer.masters.items()}, tally.to_metrics()


def assert_same(a, b, bound=1e-10):
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).abs().max() <= bound * float(b[name].abs().max()), name


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_the_factors_follows_from_that_of_the_matrix(tied):
    """For W = W0 + s B A: dB = s dW A^T and dA = s B^T dW, with dW of a learner that trains every weight."""
    decoder = small_decoder(torch.float64, tied=tied)
    learner = make_learner(decoder)
    full = small_decoder(torch.float64, tied=tied)
    full.load_state_dict(decoder.state_dict())
    algo = build_algorithm(GRPO(entropy=0.01), 16)
    got, metrics = gradient(learner, random_groups(), algo)
    plain = LocalLearner(full, LearnerConfig(), OptimConfig(), num_updates=1)
    _, same = gradient(plain, random_groups(), algo)
    expected = {}
    for name, view in hf_views(full, select=lambda p: p.grad):
        if (adapter := learner.adapters.by_name.get(name.removesuffix(".weight"))) is not None:
            d_matrix, place = to_hf_shape(name, view), f"layers.{name.split('.')[2]}.{name.split('.')[-2]}"
            expected[f"{place}.B"] = adapter.scale * d_matrix @ adapter.A.detach().t()
            expected[f"{place}.A"] = adapter.scale * adapter.B.detach().t() @ d_matrix
    assert_same(got, expected)
    assert metrics == pytest.approx(same, abs=1e-10)
    assert all(p.grad is None and not p.requires_grad for p in decoder.parameters())


def test_the_gradient_does_not_depend_on_packing_or_on_the_way_through_the_head(monkeypatch):
    algo = build_algorithm(GRPO(kl=KLConfig(weight=0.1), entropy=0.01), 16)
    decoder = small_decoder(torch.float64)
    expected, metrics = gradient(make_learner(decoder), random_groups(), algo)
    for budget, share in ((60, True), (24, True), (17, False)):
        got, _ = gradient(
            make_learner(small_decoder(torch.float64), budget=budget), random_groups(), algo, budget, share
        )
        assert_same(got, expected)
    monkeypatch.setattr(algo, "per_token", False)
    whole, same = gradient(make_learner(small_decoder(torch.float64)), random_groups(), algo)
    assert_same(whole, expected)
    assert same == pytest.approx(metrics, abs=1e-10)


def test_a_frozen_head_gets_no_gradient_of_its_own(monkeypatch):
    """The gradient of the head is not even computed and dropped: its product is never formed."""
    formed = []
    monkeypatch.setattr("cohort.learner.head.add_product", lambda total, a, b: formed.append(total))
    algo, whole = build_algorithm(GRPO(), 16), small_decoder(torch.float64)
    gradient(make_learner(small_decoder(torch.float64)), random_groups(), algo)
    assert not formed
    gradient(LocalLearner(whole, LearnerConfig(), OptimConfig(), num_updates=1), random_groups(), algo)
    assert formed


def test_the_reference_is_the_decoder_without_adapters():
    learner, base = make_learner(small_decoder()), small_decoder()
    merged = [p.clone() for p in learner.decoder.parameters()]
    frozen = LocalLearner(base, LearnerConfig(), OptimConfig(), num_updates=1, reference=copy.deepcopy(base))
    ours, theirs = random_groups(), random_groups()
    annotate(learner, ours, {"old", "ref"})
    annotate(frozen, theirs, {"ref"})
    for a, b in zip(ours, theirs, strict=True):
        for s, t in zip(a.samples, b.samples, strict=True):
            assert s.ref_logprobs == t.ref_logprobs and s.ref_logprobs != s.old_logprobs
    assert all(torch.equal(p, m) for p, m in zip(learner.decoder.parameters(), merged, strict=True))


def test_adapters_that_a_run_began_with_belong_to_the_reference():
    start = {name: torch.full_like(t, 0.05) for name, t in Adapters(small_decoder(), LORA).tensors().items()}
    decoder = small_decoder()
    adapters = Adapters(decoder, LORA, start=start)
    first = [p.clone() for p in decoder.parameters()]
    assert not torch.equal(decoder.layers[0].out, small_decoder().layers[0].out)
    learner = LocalLearner(decoder, LearnerConfig(), OptimConfig(lr=1e-2), num_updates=1, adapters=adapters)
    learner.update(make_batch(random_groups()), build_algorithm(GRPO(), 16))
    assert not torch.equal(decoder.layers[0].out, first[4])
    with adapters.hold_reference():
        assert all(torch.equal(p, f) for p, f in zip(decoder.parameters(), first, strict=True))
    with adapters.hold_base():
        assert torch.equal(decoder.layers[0].out, small_decoder().layers[0].out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_moves_the_targets_by_their_factors_and_nothing_else(dtype):
    decoder, base = small_decoder(dtype, std=0.1), small_decoder(dtype, std=0.1)
    learner = make_learner(decoder, LoraConfig(rank=2, targets=("q_proj", "down_proj")), budget=24)
    addresses = [p.data_ptr() for p in decoder.parameters()]
    before = {n: p.detach().clone() for n, p in decoder.named_parameters()}
    metrics = learner.update(make_batch(random_groups()), build_algorithm(GRPO(), 16)).metrics
    assert metrics["updates/done"] == 1.0
    moved = {n for n, p in decoder.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {f"layers.{i}.{m}" for i in range(2) for m in ("qkv", "down")}
    assert [p.data_ptr() for p in decoder.parameters()] == addresses
    for (name, mine), (_, old) in zip(hf_views(decoder), hf_views(base), strict=True):
        if (adapter := learner.adapters.by_name.get(name.removesuffix(".weight"))) is not None:
            exact = torch.addmm(to_hf_shape(name, old).float(), adapter.B, adapter.A, alpha=adapter.scale)
            assert torch.equal(to_hf_shape(name, mine), exact.detach().to(dtype)), name
    assert {entry.dtype for entry in learner.state().entries.values()} == {torch.float32}


def test_in_bf16_updates_below_the_rounding_add_up_in_the_factors():
    """Near 0.125 bf16 numbers lie 2^-10 apart: four updates of 1e-4 are below half of that, the fifth is not."""
    decoder = small_decoder(torch.bfloat16)
    decoder.layers[0].out.data.fill_(0.125)
    adapters = Adapters(decoder, LoraConfig(rank=1, alpha=1.0, targets=("o_proj",)))
    adapter, shown = adapters.layers[0]["o_proj"], []
    adapter.A.data.fill_(1.0)
    for _ in range(5):
        adapter.B.data.add_(1e-4)
        adapters.merge()
        shown.append(set(decoder.layers[0].out.flatten().tolist()))
    assert shown == [{0.125}] * 4 + [{0.125 + 2**-10}]


def test_a_step_without_signal_moves_nothing():
    learner = make_learner(small_decoder(), weight_decay=0.1)
    algo = build_algorithm(GRPO(), 16)
    # This gives Adam a momentum that could move the factors.
    learner.update(make_batch(random_groups(seed=3)), algo)
    before = {n: t.clone() for n, t in learner.state().tensors()}
    weights = [p.clone() for p in learner.decoder.parameters()]
    groups = random_groups()
    for sample in (s for g in groups for s in g.samples):
        sample.advantage = 0.0
    metrics = learner.update(make_batch(groups), algo).metrics
    assert metrics["updates/no_signal"] == 1.0
    assert all(torch.equal(t, before[n]) for n, t in learner.state().tensors())
    assert all(torch.equal(p, w) for p, w in zip(learner.decoder.parameters(), weights, strict=True))


def test_state_restores_factors_moments_and_the_merged_weights():
    algo, learner = build_algorithm(GRPO(), 16), make_learner(small_decoder())
    learner.update(make_batch(random_groups()), algo)
    state = learner.state()
    tensors = {n: t.clone() for n, t in state.tensors()}
    decoder = small_decoder()
    other = LocalLearner(
        decoder, LearnerConfig(), OptimConfig(lr=1e-2), num_updates=10, adapters=Adapters(decoder, LORA, seed=9)
    )
    other.load_state(tensors, state.numbers)
    for a, b in ((learner, other),) * 2:
        assert all(torch.equal(p, q) for p, q in zip(a.decoder.parameters(), b.decoder.parameters(), strict=True))
        for one in (a, b):
            one.update(make_batch(random_groups(seed=5)), algo)


def test_rank_0_is_a_run_without_adapters():
    with built_job(small_run(learner=LearnerConfig(token_budget=512, lora=LoraConfig(rank=0)))) as parts:
        assert parts.learner.adapters is None
        assert all(p.requires_grad for p in parts.model.decoder.parameters())
        run_steps(parts, 1)
        tensors = parts.make_checkpoint(1).optimizer.entries
        assert {name.partition("/")[0] for name in tensors} == {"exp_avg", "exp_avg_sq"}
        assert "exp_avg/embed" in tensors and "lora" not in parts.make_checkpoint(1).numbers


def test_reward_rises_with_adapters_alone():
    """The bundled model answers about a third of the problems at first."""
    recipe = tiny_lora()
    config = small_run(batch=BatchConfig(prompts=16, samples=8), learner=recipe.learner, optim=recipe.optim)
    with built_job(replace(config, task=recipe.task)) as parts:
        rewards = [stats.metrics["reward/mean"] for _, stats in run_steps(parts, 12)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
