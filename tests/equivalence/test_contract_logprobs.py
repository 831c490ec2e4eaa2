"""Numerics contract, lines 3, 4 and 5, on groups that the bundled model and SmolLM2-135M sampled.

The definition is one sequence at a time with all logits (`naive_logprobs`). In float64 differences are at most 1e-10,
in fp32 at most 1e-5 for the bundled model, and for SmolLM2 1e-5 in the mean and 2e-4 at most. Gradients are compared
relative to their largest entry.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from cohort.algos.algorithm import build_algorithm
from cohort.config.algo_sections import KLConfig
from cohort.config.load import change_config
from cohort.config.rules import validate
from cohort.config.schema import GRPO, BatchConfig, DrGRPO, EvalConfig, LearnerConfig, OptimConfig, SamplingConfig
from cohort.data.pack import make_batch
from cohort.errors import ConfigError
from cohort.fates import Fate
from cohort.jobs import build
from cohort.jobs.build import RLJob
from cohort.learner.local import LocalLearner
from cohort.loops.learning import annotate, store_update
from cohort.models.catalog import pull
from cohort.run.store.reader import Reader
from cohort.types import Group, Provenance
from tests.helpers.decoders_and_groups import (
    make_group,
    make_sample,
    naive_logprobs,
    pack_groups,
    plain_attention,
    random_groups,
    small_decoder,
)
from tests.helpers.small_runs import built_job, keep_torch_settings, make_producer, run_steps, small_run

# Ways to pack: (token budget, prefix sharing).
PACKS = [(512, True), (120, True), (512, False), (70, False)]
TEMPERATURE = 0.8
S, E = Provenance.SAMPLED, Provenance.ENVIRONMENT


@dataclass
class Bench:
    """A model, groups it sampled (advantages of both signs, one dead group), and how exact it must be."""

    parts: RLJob
    groups: list[Group]
    mean: float
    most: float

    @property
    def decoder(self):
        return self.parts.model.decoder

    def fresh(self) -> list[Group]:
        return copy.deepcopy(self.groups)

    def check(self, got: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
        gap = (got - expected).detach().abs().double() / scale
        assert gap.max() <= self.most and gap.mean() <= self.mean, (gap.max().item(), gap.mean().item())

    def check_gradients(self, got, expected) -> None:
        for name, g in expected.items():
            self.check(got[name], g, scale=float(g.abs().max()))


def sampled(parts: RLJob, num_prompts: int, group_size: int) -> list[Group]:
    """Returns sampled groups with advantages by made-up rewards. The last group is dead."""
    groups = make_producer(parts, group_size).collect(num_prompts, parts.algo.accept)
    for n, group in enumerate(groups):
        for i, s in enumerate(group.samples):
            s.reward = float((n + i) % 3 == 0)
    for s in groups[-1].samples:
        s.reward = 0.3
    return parts.algo.advantages(groups)


def bench(name: str) -> Iterator[Bench]:
    """Yields the bench "tiny", "tiny64" (in float64) or "smollm2"."""
    changes = {"sampling": SamplingConfig(max_tokens=40, temperature=TEMPERATURE)}
    if name == "smollm2":
        pull("smollm2-135m")
        changes |= {"model": "smollm2-135m"}
    if name == "tiny64":
        changes |= {"learner": LearnerConfig(token_budget=512, dtype="float64")}
    if name != "tiny":
        changes |= {"sampling": SamplingConfig(max_tokens=16, temperature=TEMPERATURE)}
    limits = {"tiny": (1e-5, 1e-5), "tiny64": (1e-10, 1e-10), "smollm2": (1e-5, 2e-4)}
    with built_job(small_run(**changes)) as parts:
        groups = sampled(parts, *((5, 4) if name == "tiny" else (3, 3)))
        yield Bench(parts, groups, *limits[name])


@pytest.fixture(scope="module", params=["tiny", "tiny64", pytest.param("smollm2", marks=pytest.mark.slow)])
def model(request) -> Iterator[Bench]:
    yield from bench(request.param)


@pytest.fixture(scope="module")
def tiny() -> Iterator[Bench]:
    yield from bench("tiny")


def learner_for(decoder, budget=512, share=True, **config) -> LocalLearner:
    optim = OptimConfig(lr=1e-3)
    settings = LearnerConfig(token_budget=budget, prefix_sharing=share, **config)
    return LocalLearner(decoder, settings, optim, num_updates=4, temperature=TEMPERATURE)


def gradient(model: Bench, groups: list[Group], algo, budget: int, share: bool):
    """Returns the gradients of one minibatch, by parameter, and its metrics."""
    learner = learner_for(model.decoder, budget, share)
    tally = learner.forward_backward(pack_groups(groups, budget, share=share).minibatches[0], algo).tally
    return {n: m.grad.clone() for n, m in learner.optimizer.masters.items()}, tally.to_metrics()


def naive(model: Bench, groups: list[Group]) -> list[torch.Tensor]:
    """Returns the log-probabilities [T] of every sample by definition."""
    return [naive_logprobs(model.decoder, g.prompt.tokens, s.tokens, TEMPERATURE) for g in groups for s in g.samples]


def test_4_3_logprobs_of_real_samples_equal_one_sequence_at_a_time(model):
    with torch.no_grad():
        expected = naive(model, model.groups)
    for budget, share in PACKS:
        groups = model.fresh()
        for g in groups:
            g.excluded = Fate.TRAINED
        annotate(learner_for(model.decoder, budget, share), groups, {"old"})
        got = [torch.tensor(s.old_logprobs, dtype=torch.float64) for g in groups for s in g.samples]
        model.check(torch.cat(got), torch.cat(expected))
        # The first token of every sibling is predicted at the shared prompt's last token.
        firsts = torch.stack([lp[0] for lp in got])
        assert (firsts - torch.stack([lp[0] for lp in expected])).abs().max() <= model.most
        assert len({round(float(x), 6) for x in firsts}) > 2


def test_4_3_sampler_logprobs_equal_the_learners(model):
    """The engine decodes with a cache and a shared prompt; the learner reads the whole sequence at once."""
    groups = model.fresh()
    for g in groups:
        g.excluded = Fate.TRAINED
    annotate(learner_for(model.decoder), groups, {"old"})
    samples = [s for g in groups for s in g.samples]
    sampler, learner = (
        torch.tensor([lp for s in samples for lp in getattr(s, name)], dtype=torch.float64)
        for name in ("sampler_logprobs", "old_logprobs")
    )
    model.check(sampler, learner)
    assert max(abs(s.sampler_logprobs[0] - s.old_logprobs[0]) for s in samples) <= model.most
    minibatch = pack_groups(groups, 512).minibatches[0]
    metrics = learner_for(model.decoder).forward_backward(minibatch, model.parts.algo).tally.to_metrics()
    assert 0 <= metrics["sampler_gap/mean"] <= model.mean and metrics["sampler_gap/max"] <= model.most


@torch.no_grad()
def test_4_3_annotations_are_at_their_tokens():
    """A conversation: the environment's tokens are context, and have no log-probability."""
    decoder, reference = small_decoder(torch.float64), small_decoder(torch.float64, seed=1)
    learner = LocalLearner(decoder, LearnerConfig(), OptimConfig(), num_updates=1, reference=reference)
    turns = make_sample([7, 8, 20, 21, 9, 2], [S, S, E, E, S, S])
    groups = [make_group([5, 6], [make_sample([3, 2]), turns, make_sample([], [])])]
    annotate(learner, groups, {"old", "ref"})
    for values, of in ((turns.old_logprobs, decoder), (turns.ref_logprobs, reference)):
        expected = naive_logprobs(of, [5, 6], turns.tokens) * torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0])
        assert values == pytest.approx(expected.tolist(), abs=1e-10)
    assert groups[0].samples[2].old_logprobs is None  # it has no tokens
    with pytest.raises(AssertionError, match="reference"):
        annotate(learner_for(decoder), groups, {"ref"})


def test_4_3_gradients_of_real_samples_equal_one_sequence_at_a_time(model):
    """The token mean written out on naive log-probabilities; the dead group only in the denominator."""
    num_tokens = sum(len(s.tokens) for g in model.groups for s in g.samples)
    alive = [g for g in model.groups if not g.excluded]
    assert len(alive) == len(model.groups) - 1
    model.decoder.zero_grad()
    advantages = [s.advantage for g in alive for s in g.samples]
    terms = [a * lp.sum() for a, lp in zip(advantages, naive(model, alive), strict=True)]
    (-sum(terms) / num_tokens).backward()
    expected = {n: p.grad.clone() for n, p in model.decoder.named_parameters()}
    algo = build_algorithm(GRPO(aggregate="token"), 40)
    for budget, share in PACKS:
        model.check_gradients(gradient(model, model.fresh(), algo, budget, share)[0], expected)


def test_4_4_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(model):
    check_cuts(model, GRPO())


@pytest.mark.parametrize("config", [GRPO(aggregate="token"), DrGRPO()], ids=["token", "constant"])
def test_4_4_every_aggregation_is_independent_of_the_cut(tiny, config):
    check_cuts(tiny, config)


def check_cuts(model: Bench, config: GRPO) -> None:
    """Compares loss and gradient of different cuts and orders of the same groups."""
    algo = build_algorithm(config, 40)
    expected, metrics = gradient(model, model.fresh(), algo, *PACKS[0])
    shuffled = model.fresh()
    random.Random(3).shuffle(shuffled)
    for g in shuffled:
        random.Random(4).shuffle(g.samples)
    for groups, cut in [(model.fresh(), cut) for cut in PACKS[1:]] + [(shuffled, PACKS[1])]:
        got, same = gradient(model, groups, algo, *cut)
        model.check_gradients(got, expected)
        assert same["loss"] == pytest.approx(metrics["loss"], abs=model.most)
        assert same["tokens"] == metrics["tokens"]


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_4_5_ratio_is_exactly_one_before_anything_has_moved(epochs, minibatches, monkeypatch):
    """Through the real loop: dead groups leave the pack between the annotation and the update."""
    learner = LearnerConfig(token_budget=256, epochs=epochs, minibatches=minibatches)
    with built_job(small_run(learner=learner, optim=OptimConfig(lr=3e-4))) as made:
        ratios = []
        whole = made.learner.forward_backward

        def watched(minibatch, algo):
            result = whole(minibatch, algo)
            ratios.append(result.tally.to_metrics())
            return result

        monkeypatch.setattr(made.learner, "forward_backward", watched)
        steps = run_steps(made, 2)
        assert any(g.excluded == Fate.CONSTANT_REWARD for groups, _ in steps for g in groups)
    updates = epochs * minibatches
    assert len(ratios) == 2 * updates
    for first in ratios[::updates]:  # of each step
        assert first["ratio/min"] == first["ratio/max"] == 1.0
        assert first["clip/low"] == first["clip/high"] == first["kl/old"] == 0.0
    for later in (r for i, r in enumerate(ratios) if i % updates):
        assert later["ratio/min"] < 1.0 < later["ratio/max"]


def naive_entropy(decoder, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Returns the entropy [T] at each token of a completion, by definition."""
    tokens = torch.tensor([*prompt, *completion])
    hidden = decoder(tokens, torch.arange(len(tokens)), plain_attention())[len(prompt) - 1 : -1]
    logp = torch.log_softmax(decoder.logits(hidden) / TEMPERATURE, -1)
    return -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_4_4_the_whole_loss_written_out(estimator):
    """Second update of a batch, so that ratios differ from 1: clip, KL to another policy and entropy by formula."""
    decoder, reference = small_decoder(torch.float64, std=0.15), small_decoder(torch.float64, seed=1, std=0.15)
    config = GRPO(
        kl=KLConfig(weight=0.1, estimator=estimator), entropy=0.02, clip_low=0.1, clip_high=0.3, aggregate="token"
    )
    algo, groups = build_algorithm(config, 16), random_groups()
    optim = OptimConfig(lr=1e-2)
    learner = LocalLearner(decoder, LearnerConfig(), optim, num_updates=9, temperature=TEMPERATURE, reference=reference)
    annotate(learner, groups, algo.needs() | {"old"})
    store_update(groups, learner.update(make_batch(groups), algo))
    learner.forward_backward(pack_groups(groups, 60).minibatches[0], algo)
    got = {n: m.grad.clone() for n, m in learner.optimizer.masters.items()}
    decoder.zero_grad()
    total, num_tokens, num_clipped = torch.zeros((), dtype=torch.float64), 0, 0
    for g in groups:
        for s in g.samples:
            lp = naive_logprobs(decoder, g.prompt.tokens, s.tokens, TEMPERATURE)
            entropy = naive_entropy(decoder, g.prompt.tokens, s.tokens)
            ref = naive_logprobs(reference, g.prompt.tokens, s.tokens, TEMPERATURE).detach()
            ratio = torch.exp(lp - torch.tensor(s.old_logprobs, dtype=torch.float64))
            kept = ratio.clamp(0.9, 1.3)
            num_clipped += int((ratio != kept).sum())
            policy = torch.minimum(ratio * s.advantage, kept * s.advantage)
            d = lp - ref
            divergence = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[estimator]
            total = total + (-policy + 0.1 * divergence - 0.02 * entropy).sum()
            num_tokens += len(s.tokens)
    assert num_clipped > 3
    (total / num_tokens).backward()
    for name, p in decoder.named_parameters():
        assert (got[name] - p.grad).abs().max() <= 1e-10 * float(p.grad.abs().max()), name


def test_4_5_old_logprobs_of_another_moment_are_used(tiny):
    """Only weights that have not moved since the annotation make the ratio 1 by definition."""
    learner, groups = learner_for(tiny.decoder), tiny.fresh()
    learner.update_index = 3
    annotate(learner, groups, {"old"})
    for s in (s for g in groups for s in g.samples):
        if s.old_logprobs is not None:
            s.old_logprobs = [lp - 0.1 for lp in s.old_logprobs]
    minibatch = pack_groups(groups, 512).minibatches[0]

    def ratio(of: LocalLearner) -> float:
        return of.forward_backward(minibatch, tiny.parts.algo).tally.to_metrics()["ratio/mean"]

    assert ratio(learner) == 1.0
    learner.update_index = 4  # an update later
    assert ratio(learner) == ratio(learner_for(tiny.decoder)) == pytest.approx(1.10517, abs=1e-4)  # exp(0.1)


def test_4_5_truncated_sampling_must_be_asked_for():
    config = small_run(sampling=SamplingConfig(max_tokens=32, top_p=0.9))
    with pytest.raises(ConfigError, match="allow-truncation"):
        validate(config)
    with pytest.raises(ConfigError, match="allow-truncation"):
        change_config(small_run(), ["--sampling.top-k", "5"])
    validate(replace(config, sampling=replace(config.sampling, allow_truncation=True)))


def test_4_5_truncated_sampling_warns(tmp_path):
    sampling = SamplingConfig(max_tokens=8, top_k=5, allow_truncation=True)
    small = {"steps": 1, "batch": BatchConfig(prompts=2, samples=2), "eval": EvalConfig(problems=2)}
    with keep_torch_settings():
        warned = [build.train(small_run(sampling=s, **small), tmp_path, "plain") for s in (sampling, SamplingConfig())]
    events = []
    for path in warned:
        with Reader(path / "run.db") as reader:
            events.append([e.text for e in reader.read_events(kind="sampling")])
    assert len(events[0]) == 1 and "not exactly the one that is trained" in events[0][0]
    assert events[1] == []


def test_4_5_truncated_sampling_records_what_it_kept_and_keeps_the_full_logprobs():
    sampling = SamplingConfig(max_tokens=24, temperature=TEMPERATURE, top_p=0.7, allow_truncation=True)
    with built_job(small_run(sampling=sampling, batch=BatchConfig(prompts=4, samples=4))) as made:
        groups, stats = run_steps(made, 1)[0]
        samples = [s for g in groups for s in g.samples]
    kept = [m for s in samples for m in s.kept_mass]
    assert all(len(s.kept_mass) == len(s.tokens) for s in samples)
    assert min(kept) >= 0.7 - 1e-6 and max(kept) <= 1 + 1e-6 and sum(kept) < len(kept)
    assert stats.metrics["sampling/kept_mass"] == pytest.approx(sum(kept) / len(kept), abs=1e-12)
    # A new job has the weights from before the step.
    with built_job(small_run()) as same_weights, torch.no_grad():
        for g in groups[:2]:
            for s in g.samples:
                full = naive_logprobs(same_weights.model.decoder, g.prompt.tokens, s.tokens, TEMPERATURE)
                assert s.sampler_logprobs == pytest.approx(full.tolist(), abs=1e-5)
