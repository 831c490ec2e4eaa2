"""Numerics contract, lines 2, 4, 5, 7 and 8, on the learner with small random decoders."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch

from cohort.algos.algorithm import build_algorithm
from cohort.config.algo_sections import KLConfig
from cohort.config.algos import CISPO, GSPO
from cohort.config.schema import GRPO, DrGRPO, LearnerConfig, OptimConfig
from cohort.data.pack import make_batch
from cohort.errors import TrainingStopped
from cohort.fates import Fate
from cohort.learner import local
from cohort.learner.backend import FusedBackend
from cohort.learner.local import LocalLearner
from cohort.learner.optim import learning_rate
from cohort.loops.learning import annotate, store_update
from cohort.types import Finish, Provenance
from cohort.world import World
from tests.helpers.decoders_and_groups import (
    TOLERANCE,
    make_group,
    make_sample,
    naive_logprobs,
    pack_groups,
    plain_attention,
    random_groups,
    small_decoder,
)

S, E = Provenance.SAMPLED, Provenance.ENVIRONMENT


def learner_for(decoder, budget=1000, share=True, reference=None, optim=None, **config):
    config = LearnerConfig(token_budget=budget, prefix_sharing=share, **config)
    return LocalLearner(decoder, config, optim or OptimConfig(lr=1e-2), num_updates=10, reference=reference)


def gradient(decoder, groups, algo, budget=1000, share=True, reference=None):
    """Returns the gradients of one minibatch, by parameter, and its metrics."""
    learner = learner_for(decoder, budget, share, reference)
    annotate(learner, groups, algo.needs() | {"old"})
    batch = pack_groups(groups, budget, share=share)
    assert len(batch.minibatches) == 1
    tally = learner.forward_backward(batch.minibatches[0], algo).tally
    return {n: m.grad.clone() for n, m in learner.optimizer.masters.items()}, tally.to_metrics()


def assert_same(a, b, dtype):
    """Compares gradients by parameter, relative to the largest entry of each in `b`."""
    for name in a:
        scale = float(b[name].abs().max())
        assert (a[name] - b[name]).abs().max() <= TOLERANCE[dtype] * scale, name


@pytest.mark.parametrize("config", [GRPO(kl=KLConfig(weight=0.1), entropy=0.01), GRPO(aggregate="token"), DrGRPO()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_4_4_gradient_independent_of_microbatch_packing_order_and_sharing(dtype, config):
    decoder, reference = small_decoder(dtype, std=0.15), small_decoder(dtype, seed=1, std=0.15)
    algo = build_algorithm(config, max_tokens=16)
    groups = random_groups(num_groups=5)
    # The group counts in the denominators but is not packed.
    groups[3].excluded = Fate.CONSTANT_REWARD
    for s in groups[3].samples:
        s.advantage = 0.0
    expected, metrics = gradient(decoder, copy.deepcopy(groups), algo, reference=reference)
    for budget, share in ((60, True), (24, True), (1000, False), (17, False)):
        got, same = gradient(decoder, copy.deepcopy(groups), algo, budget, share, reference)
        assert_same(got, expected, dtype)
        assert same["loss"] == pytest.approx(metrics["loss"], abs=TOLERANCE[dtype])
    shuffled = copy.deepcopy(groups)
    random.Random(1).shuffle(shuffled)
    for g in shuffled:
        random.Random(2).shuffle(g.samples)
    assert_same(gradient(decoder, shuffled, algo, 60, True, reference)[0], expected, dtype)


def test_4_4_the_loss_is_the_formula_written_out():
    """Token mean of -A * logp's gradient, by autograd on naive log-probabilities, dead group in the denominator."""
    decoder = small_decoder(torch.float64)
    groups = random_groups(num_groups=3)
    groups[1].excluded = Fate.CONSTANT_REWARD
    got, _ = gradient(decoder, copy.deepcopy(groups), build_algorithm(GRPO(aggregate="token"), 16))
    num_tokens = sum(len(s.tokens) for g in groups for s in g.samples)
    decoder.zero_grad()
    total = sum(
        s.advantage * naive_logprobs(decoder, g.prompt.tokens, s.tokens).sum()
        for g in groups
        for s in g.samples
        if not g.excluded
    )
    (-total / num_tokens).backward()
    assert_same(got, {n: p.grad for n, p in decoder.named_parameters()}, torch.float64)


@pytest.mark.parametrize("config", [GRPO(kl=KLConfig(weight=0.1), entropy=0.01), GRPO(aggregate="token")])
def test_4_4_both_ways_through_the_head_give_one_gradient(config, monkeypatch):
    """A loss per token takes its gradient chunk by chunk with the logits; any other sees all tokens first."""
    decoder, reference = small_decoder(torch.float64), small_decoder(torch.float64, seed=1)
    algo = build_algorithm(config, max_tokens=16)
    expected, metrics = gradient(decoder, random_groups(), algo, reference=reference)
    monkeypatch.setattr("cohort.learner.head.CHUNK_LOGITS", 61 * 5)
    chunked, _ = gradient(decoder, random_groups(), algo, reference=reference)
    monkeypatch.setattr(algo, "per_token", False)
    whole, same = gradient(decoder, random_groups(), algo, reference=reference)
    assert_same(chunked, expected, torch.float64)
    assert_same(whole, expected, torch.float64)
    assert same == pytest.approx(metrics, abs=1e-10)


def test_4_5_ratio_is_exactly_one_before_the_first_update():
    decoder = small_decoder()
    algo = build_algorithm(GRPO(), 16)
    # Without and with annotation; the annotation uses the same packing.
    for needs in (set(), {"old"}):
        groups = random_groups()
        learner = learner_for(decoder)
        annotate(learner, groups, needs)
        metrics = learner.forward_backward(pack_groups(groups, 1000).minibatches[0], algo).tally.to_metrics()
        assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0


def test_4_5_the_learner_divides_by_the_sampling_temperature():
    decoder = small_decoder(torch.float64)
    groups = random_groups(num_groups=1, group_size=2)
    learner = LocalLearner(decoder, LearnerConfig(), OptimConfig(), num_updates=1, temperature=0.5)
    annotate(learner, groups, {"old"})
    expected = naive_logprobs(decoder, groups[0].prompt.tokens, groups[0].samples[0].tokens, 0.5)
    torch.testing.assert_close(torch.tensor(groups[0].samples[0].old_logprobs, dtype=torch.float64), expected)


def test_4_8_environment_tokens_have_exactly_zero_gradient_and_are_seen():
    """A scripted conversation: two sampled turns with a tool result between them."""
    decoder = small_decoder(torch.float64)
    algo = build_algorithm(GRPO(aggregate="token"), 16)
    turns = make_sample([7, 8, 20, 21, 22, 9, 2], [S, S, E, E, E, S, S], advantage=1.0)
    groups = [make_group([5, 6], [turns, make_sample([3, 2], advantage=-1.0)])]
    batch = pack_groups(groups, 1000)
    micro = batch.minibatches[0].microbatches[0]
    assert sorted(micro.targets.tolist()) == sorted([7, 8, 9, 2, 3, 2])
    got, _ = gradient(decoder, groups, algo)
    decoder.zero_grad()
    first = naive_logprobs(decoder, [5, 6], turns.tokens)
    sampled = torch.tensor([p == S for p in turns.provenance])
    loss = -(first[sampled].sum() - naive_logprobs(decoder, [5, 6], [3, 2]).sum()) / 6
    loss.backward()
    assert_same(got, {n: p.grad for n, p in decoder.named_parameters()}, torch.float64)
    # The tool's tokens are context, so they change what follows.
    turns.tokens[3] = 40
    changed, _ = gradient(decoder, groups, algo)
    assert (changed["layers.0.out"] - got["layers.0.out"]).abs().max() > 1e-6


def test_4_2_a_sampled_end_token_is_trained_and_truncation_is_a_choice():
    samples = [make_sample([7, 2], reward=1.0), make_sample([8, 9, 10], reward=0.0)]
    samples[1].finish = Finish.LENGTH
    for choice, targets in (("keep", [7, 2, 8, 9, 10]), ("mask", [7, 2]), ("penalize", [7, 2, 8, 9, 10])):
        algo = build_algorithm(GRPO(truncated=choice), 16)
        groups = algo.advantages([make_group([5], [copy.copy(s) for s in samples])])
        micro = pack_groups(groups, 100).minibatches[0].microbatches[0]
        assert micro.targets.tolist() == targets
        assert 2 in micro.targets.tolist()


@pytest.mark.parametrize("rewards", [[0.1] * 4, [1 / 3] * 4, [0.0] * 4])
def test_4_8_constant_rewards_give_exactly_zero_gradient_and_no_optimizer_step(rewards):
    decoder = small_decoder()
    algo = build_algorithm(GRPO(), 16)
    groups = random_groups(num_groups=2)
    for g in groups:
        for s, r in zip(g.samples, rewards, strict=True):
            s.reward = r
    learner = learner_for(decoder)
    warm = random_groups(seed=3)
    # This gives Adam a momentum that could move the weights.
    learner.update(make_batch(warm), algo)
    before = {n: p.detach().clone() for n, p in decoder.named_parameters()}
    batch = pack_groups(algo.advantages(groups), 1000)
    metrics = learner.update(batch.batch, algo).metrics
    assert metrics["updates/no_signal"] == 1.0 and metrics["grad_norm"] == 0.0
    assert batch.counts == {"no_signal": 8}
    assert all(torch.equal(p, before[n]) for n, p in decoder.named_parameters())
    # Even if the groups are packed, the gradient is exactly zero.
    for g in groups:
        g.excluded = Fate.TRAINED
    learner.forward_backward(pack_groups(groups, 1000).minibatches[0], algo)
    assert all(not g.any() for g in learner.optimizer.grads())


def test_4_7_masters_moments_and_gradients_are_fp32_in_a_bf16_model():
    decoder = small_decoder(torch.bfloat16, std=0.1)
    learner = learner_for(decoder, budget=24, optim=OptimConfig(lr=1e-4, clip_norm=0.0))
    algo = build_algorithm(GRPO(), 16)
    start = {n: m.detach().clone() for n, m in learner.optimizer.masters.items()}
    batch = pack_groups(random_groups(), 24)
    assert len(batch.minibatches[0].microbatches) > 1
    learner.forward_backward(batch.minibatches[0], algo)
    assert all(g.dtype == torch.float32 for g in learner.optimizer.grads())
    learner.optim_step()
    state = learner.optimizer.state()
    assert {t.dtype for t in state.values()} == {torch.float32}
    assert {k.split("/")[0] for k in state} == {"exp_avg", "exp_avg_sq", "master"}
    for name, p in decoder.named_parameters():
        master = learner.optimizer.masters[name]
        assert p.dtype == torch.bfloat16 and torch.equal(p, master.to(torch.bfloat16))
    pairs = [(m, start[n]) for n, m in learner.optimizer.masters.items()]
    moved = sum(int((m != s).sum()) for m, s in pairs)
    rounded = sum(int((m.bfloat16() != s.bfloat16()).sum()) for m, s in pairs)
    assert moved > 2 * rounded > 0, "steps below bf16's resolution survive in the masters"


def test_non_finite_gradients_are_skipped_counted_and_finally_stop_the_run(monkeypatch):
    decoder = small_decoder()
    monkeypatch.setattr(local, "MAX_BAD_UPDATES", 2)
    learner = learner_for(decoder, optim=OptimConfig(lr=1e-2))
    algo = build_algorithm(GRPO(), 16)
    bad = random_groups()
    bad[0].samples[0].advantage = float("inf")
    before = decoder.embed.detach().clone()
    assert learner.update(make_batch(bad), algo).metrics["updates/bad"] == 1.0
    assert torch.equal(decoder.embed, before)
    with pytest.raises(TrainingStopped, match="2 updates in a row had non-finite"):
        learner.update(make_batch(bad), algo)


def test_warm_up_reaches_the_optimizer():
    """Checks the step that the weights really take: a computed warm-up could be ignored."""
    moved = {}
    for warmup in (0, 10):
        decoder = small_decoder()
        before = decoder.norm.weight.detach().clone()
        learner = learner_for(decoder, optim=OptimConfig(lr=1e-3, warmup=warmup))
        metrics = learner.update(make_batch(random_groups()), build_algorithm(GRPO(), 16)).metrics
        moved[warmup] = (decoder.norm.weight - before).abs().max().item()
        assert metrics["lr"] == learning_rate(learner.optim, 0, 10)
    assert moved[10] == pytest.approx(moved[0] / 10, rel=1e-3)


def test_clipping_bounds_the_global_norm():
    """Checks the gradients that the optimizer gets: Adam's first step does not show their norm."""
    decoder = small_decoder()
    learner = learner_for(decoder, optim=OptimConfig(lr=1e-3, clip_norm=1e-3))
    learner.forward_backward(pack_groups(random_groups(), 1000).minibatches[0], build_algorithm(GRPO(), 16))
    metrics = learner.optim_step()
    norm = torch.stack([g.norm() for g in learner.optimizer.grads()]).norm().item()
    assert metrics["grad_norm"] > 1e-3 and metrics["updates/clipped"] == 1.0
    assert norm == pytest.approx(1e-3, rel=1e-5)


def test_state_round_trip_continues_bit_for_bit():
    algo = build_algorithm(GRPO(kl=KLConfig(weight=0.1)), 16)
    reference = small_decoder(seed=5)

    def fresh():
        return learner_for(small_decoder(), reference=reference, epochs=2, minibatches=2)

    def step(learner, seed):
        groups = random_groups(seed=seed, num_groups=4)
        annotate(learner, groups, algo.needs() | {"old"})
        return learner.update(make_batch(groups, minibatches=2), algo).metrics

    whole = fresh()
    for seed in range(4):
        last = step(whole, seed)
    half = fresh()
    for seed in range(2):
        step(half, seed)
    state = half.state()
    resumed = fresh()
    resumed.decoder.load_state_dict(half.decoder.state_dict())
    resumed.load_state({k: v.clone() for k, v in state.collect().items()}, state.numbers)
    for seed in range(2, 4):
        again = step(resumed, seed)
    assert last == again
    for (n, p), q in zip(whole.decoder.named_parameters(), resumed.decoder.parameters(), strict=True):
        assert torch.equal(p, q), n


@pytest.mark.parametrize(("epochs", "minibatches"), [(2, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("config", [GRPO(), CISPO(), GSPO(clip_low=0.2, clip_high=0.2)])
def test_4_5_later_updates_compare_with_the_policy_of_the_beginning(config, epochs, minibatches):
    """The update computes the old log-probabilities itself. They equal those of an annotation before it."""
    algo, weights, found = build_algorithm(config, 16), [], []
    for asked in (False, True):
        groups = random_groups(num_groups=6)
        learner = learner_for(small_decoder(torch.float64), budget=40, epochs=epochs, minibatches=minibatches)
        if asked:
            annotate(learner, groups, {"old"})
        update = learner.update(make_batch(groups, minibatches), algo)
        assert sorted(update.old.ids) == ([] if asked else sorted(id for g in groups for id in g.ids()))
        store_update(groups, update)
        found.append(update.metrics)
        weights.append({name: p.detach().clone() for name, p in learner.decoder.named_parameters()})
        assert all(s.old_logprobs is not None for g in groups for s in g.samples)
    assert found[0]["ratio/min"] < 0.99 and found[0]["ratio/max"] > 1.01
    clipped_away = found[0].get("updates/no_signal", 0.0)
    assert found[0]["updates/done"] + clipped_away == epochs * minibatches
    assert found[0] == pytest.approx(found[1], abs=1e-10)
    assert_same(*weights, torch.float64)


@pytest.mark.parametrize(("epochs", "minibatches", "parts"), [(1, 1, 0), (4, 1, 0), (1, 2, 1), (2, 3, 2)])
def test_only_later_minibatches_get_a_pass_for_old_logprobs(epochs, minibatches, parts, monkeypatch):
    """The first minibatch is updated with unmoved weights. A group without signal is in no minibatch."""
    seen = []
    logprobs = FusedBackend.logprobs
    watched = lambda self, micro, *rest: (seen.append(len(micro.targets)), logprobs(self, micro, *rest))[1]  # noqa: E731
    monkeypatch.setattr(FusedBackend, "logprobs", watched)
    trained, backward = [], FusedBackend.backward
    noted = lambda self, micro, *rest: (trained.append(micro.tokens), backward(self, micro, *rest))[1]  # noqa: E731
    monkeypatch.setattr(FusedBackend, "backward", noted)
    groups = random_groups(num_groups=6)
    groups[1].excluded = Fate.CONSTANT_REWARD
    batch = pack_groups(groups, 1000, minibatches=minibatches)
    learner = learner_for(small_decoder(), epochs=epochs, minibatches=minibatches)
    store_update(groups, learner.update(batch.batch, build_algorithm(GRPO(), 16)))
    later = [sum(len(m.targets) for m in part.microbatches) for part in batch.minibatches[1:]]
    assert seen == later and len(seen) == parts
    assert all(s.old_logprobs is None for s in groups[1].samples)
    packs = [m.tokens for part in batch.minibatches for m in part.microbatches] * epochs
    assert all(torch.equal(a, b) for a, b in zip(trained, packs, strict=True)), "they were packed otherwise"


def test_failed_samples_are_in_no_denominator():
    groups = random_groups(num_groups=1, group_size=3)
    groups[0].samples[0] = dataclasses.replace(groups[0].samples[0], failure="worker died")
    minibatch = pack_groups(groups, 100).minibatches[0]
    assert minibatch.counts.num_samples == 2
    assert minibatch.counts.num_tokens == sum(len(s.tokens) for s in groups[0].samples[1:])


def test_in_bf16_the_residual_stream_is_fp32():
    """Weights and products in bf16, the stream between them exact: closer to the exact model than a bf16 stream is."""
    half = small_decoder(torch.bfloat16, std=0.1, num_layers=12)
    exact = small_decoder(torch.float32, std=0.1, num_layers=12)
    with torch.no_grad():
        for p, q in zip(exact.parameters(), half.parameters(), strict=True):
            p.copy_(q.float())
        tokens = torch.arange(50) % 61
        x = half.embed.index_select(0, tokens)
        cos, sin = half.compute_cos_sin(torch.arange(50), torch.bfloat16)
        stream, rounded = x.float(), x
        for layer in half.layers:
            stream = sum(layer(stream, None, cos, sin, plain_attention()))
            rounded = sum(layer(rounded, None, cos, sin, plain_attention())).bfloat16()
        assert stream.dtype == torch.float32
        truth = exact(tokens, torch.arange(50), plain_attention())
        mine = half(tokens, torch.arange(50), plain_attention())
    assert torch.equal(mine, half.norm(stream))
    assert (mine - truth).norm() < 0.8 * (half.norm(rounded) - truth).norm()


# ---- memory


class CountingWorld(World):
    """A world that counts how often ranks would have summed together."""

    def __init__(self):
        super().__init__()
        self.num_sums = 0

    def sum(self, x):
        self.num_sums += 1
        return x


def one_update(groups, decoder, token_budget=1000, recompute=False, refuse_above=None):
    """Computes the gradient of a GRPO minibatch. Microbatches above `refuse_above` tokens run out of memory.

    Returns the learner, the gradients by parameter, the tally and the sizes of the refused microbatches.
    """
    learner = LocalLearner(decoder, LearnerConfig(token_budget=token_budget), OptimConfig(), num_updates=1)
    decoder.recompute = recompute
    # The budget may shrink for later updates too.
    learner.expect_samples(1)
    backward, refused = learner.backend.backward, []

    def scarce(micro, *rest):
        if refuse_above is not None and len(micro.tokens) > refuse_above:
            refused.append(len(micro.tokens))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")
        return backward(micro, *rest)

    learner.backend.backward = scarce
    learner.world = CountingWorld()
    minibatch = pack_groups(groups, learner.token_budget).minibatches[0]
    tally = learner.forward_backward(minibatch, build_algorithm(GRPO(), 16)).tally
    return learner, {n: m.grad.clone() for n, m in learner.optimizer.masters.items()}, tally, refused


def test_recomputed_activations_change_no_bit():
    groups = random_groups()
    _, kept, _, _ = one_update(groups, small_decoder(torch.float32))
    _, again, _, _ = one_update(groups, small_decoder(torch.float32), recompute=True)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_out_of_memory_starts_the_update_again_in_smaller_microbatches():
    groups = random_groups(num_groups=6)
    _, expected, tally, _ = one_update(groups, small_decoder(torch.float64))
    learner, got, got_tally, refused = one_update(groups, small_decoder(torch.float64), refuse_above=50)
    assert refused and refused[0] > 50, "memory was not short"
    assert learner.token_budget <= refused[0] // 2
    assert learner.world.num_sums == 1, "other ranks do not start again"
    # Notices come back with the next update.
    told = learner.update(make_batch([]), build_algorithm(GRPO(), 16)).notices
    assert [level for level, text in told if f"instead of {refused[0]} tokens per microbatch" in text] == ["warning"]
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, atol=1e-12, rtol=1e-9)
    assert got_tally.to_metrics()["tokens"] == tally.to_metrics()["tokens"], "half an attempt was counted"


def test_a_sample_that_never_fits_stops_training_with_the_reason():
    with pytest.raises(TrainingStopped, match=r"single sample of \d+ tokens .*Tried to allocate 2.00 GiB"):
        one_update(random_groups(), small_decoder(torch.float32), refuse_above=3)


def test_after_running_out_of_memory_a_longer_sample_is_still_accepted_if_no_limit_is_known():
    learner = learner_for(small_decoder(), budget=200)
    backward, short = learner.backend.backward, [True]

    def scarce(micro, *rest):
        if short and short.pop():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return backward(micro, *rest)

    learner.backend.backward = scarce
    algo = build_algorithm(GRPO(), 16)
    told = learner.update(make_batch(random_groups(num_groups=6)), algo).notices
    assert any("out of memory" in text for _, text in told)
    long = make_group([1, 2], [make_sample([3] * 150, advantage=1.0), make_sample([4] * 3, advantage=-1.0)])
    assert learner.update(make_batch([long]), algo).metrics["updates/done"] == 1.0


def test_compute_gradient_takes_samples_longer_than_the_budget():
    """`cohort check` adds tokens to samples that already have the greatest length of a run."""
    long = make_group([1, 2], [make_sample([3] * 30, advantage=1.0), make_sample([4] * 3, advantage=-1.0)])
    algo = build_algorithm(GRPO(), 16)
    small, large = (
        learner_for(small_decoder(torch.float64), budget=b).compute_gradient(make_batch([long]), algo) for b in (20, 99)
    )
    assert_same(small.tensors, large.tensors, torch.float64)


def test_a_restored_learner_forgets_what_it_annotated():
    """Otherwise it would take old log-probabilities of other weights for its own, and every ratio for 1."""
    learner, algo = learner_for(small_decoder(torch.float64)), build_algorithm(GRPO(), 16)
    before = learner.snapshot()
    groups = random_groups()
    annotate(learner, groups, {"old"})
    learner.update(make_batch(groups), algo)
    learner.restore(before)
    for s in (s for g in groups for s in g.samples):
        s.old_logprobs = [-3.0] * len(s.tokens)
    metrics = learner.update(make_batch(groups), algo).metrics
    assert metrics["ratio/max"] > 1.1
    assert metrics == learner_for(small_decoder(torch.float64)).update(make_batch(groups), algo).metrics
