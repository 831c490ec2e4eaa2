"""The training loop: which weights sample, what is stored in the samples, and how batches are packed."""

from __future__ import annotations

import math

import pytest

from cohort.config.algo_sections import KLConfig
from cohort.config.schema import GRPO, BatchConfig, LearnerConfig, OptimConfig
from cohort.data import pack as packing
from cohort.learner import local
from cohort.learner.local import LocalLearner
from tests.helpers.small_runs import built_job, run_steps, small_run


def test_every_step_samples_with_the_weights_of_the_step_before():
    with built_job(small_run(optim=OptimConfig(lr=1e-3))) as job:
        for step, (groups, stats) in enumerate(run_steps(job, 3)):
            assert {tuple(s.versions) for g in groups for s in g.samples} == {((0, step),)}
            assert stats.metrics["sampler_gap/max"] < 1e-4  # nothing cached of older weights is read
        assert job.engine.version == 3


def test_each_step_continues_the_prompt_stream():
    with built_job(small_run(batch=BatchConfig(prompts=4, samples=2))) as job:
        drawn = [g.prompt.id for groups, _ in run_steps(job, 3) for g in groups]
    assert len(set(drawn)) == 12  # of 24 rows


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (2, 1), (1, 3)])
def test_logprobs_of_the_update_are_stored_in_the_samples_it_trained_on(epochs, minibatches, monkeypatch):
    """No separate forward pass computes them before the update."""
    asked = []
    annotate = LocalLearner.annotate
    watched = lambda self, g, needs, on: (asked.append(needs), annotate(self, g, needs, on))[1]  # noqa: E731
    monkeypatch.setattr(LocalLearner, "annotate", watched)
    learner = LearnerConfig(token_budget=512, epochs=epochs, minibatches=minibatches)
    with built_job(small_run(learner=learner, batch=BatchConfig(prompts=3, samples=4))) as job:
        [(groups, stats)] = run_steps(job, 1)
    assert asked == [set(), set()]
    assert any(not g.excluded for g in groups)
    for group in groups:
        for sample in group.samples:
            assert (sample.old_logprobs is not None) == (not group.excluded)
            if sample.old_logprobs is not None:
                assert sample.old_logprobs == pytest.approx(sample.sampler_logprobs, abs=1e-4)
    updates = sum(stats.metrics.get(f"updates/{fate}", 0.0) for fate in ("done", "no_signal"))
    assert updates == epochs * minibatches


@pytest.mark.parametrize(("share", "budget"), [(True, 512), (False, 512), (True, 70)])
def test_packs_are_cut_as_configured(share, budget, monkeypatch):
    asked = []

    def watched(*args, **kwargs):
        minibatches = packing.pack(*args, **kwargs)
        asked.append(minibatches)
        return minibatches

    monkeypatch.setattr(local, "pack", watched)
    with built_job(small_run(learner=LearnerConfig(token_budget=budget, prefix_sharing=share))) as job:
        [(groups, stats)] = run_steps(job, 1)
    micros = asked[0][0].microbatches
    alive = [g for g in groups if not g.excluded]
    copies = sum(len(g.prompt.tokens) * (1 if share else len(g.samples)) for g in alive)
    whole = sum(len(s.tokens) for g in alive for s in g.samples) + copies
    inputs = whole - sum(len(g.samples) for g in alive)  # a sample's last token predicts nothing
    assert stats.metrics["pack/tokens"] == sum(len(m.tokens) for m in micros)
    assert stats.metrics["pack/microbatches"] == len(micros)
    assert max(len(m.tokens) + len(m.segments.unique()) for m in micros) <= budget  # only whole samples fill it
    if budget == 512:
        assert stats.metrics["pack/tokens"] == inputs and len(micros) == -(-whole // 512)
    else:
        assert len(micros) > 2 and stats.metrics["pack/tokens"] >= inputs


def test_groups_an_algorithm_does_not_accept_are_replaced_and_leave_no_gradient(monkeypatch):
    with built_job(small_run(batch=BatchConfig(prompts=3, samples=4))) as job:
        monkeypatch.setattr(job.algo, "accept", lambda g: 0 < sum(s.reward for s in g.samples) < 4, raising=False)
        [(groups, stats)] = run_steps(job, 1)
    refused = [g for g in groups if g.excluded == "not accepted"]
    assert refused and len(groups) - len(refused) == 3
    assert stats.metrics["groups/not_accepted"] == len(refused) and stats.metrics["groups/in_loss"] == 3
    assert all(s.advantage == 0.0 for g in refused for s in g.samples)


def test_a_kl_in_the_reward_is_seen_by_the_baseline_and_not_by_the_reward():
    """Step 2: the policy has moved from its reference, so equal rewards are no longer equal returns."""
    config = small_run(algo=GRPO(kl=KLConfig(weight=5.0, place="reward"), scale="none"), optim=OptimConfig(lr=1e-2))
    with built_job(config) as job:
        _, (second, stats) = run_steps(job, 2)
    for g in second:
        assert all(s.ref_logprobs is not None and s.old_logprobs is not None for s in g.samples)
        returns = []
        for s in g.samples:
            gaps = [old - ref for old, ref in zip(s.old_logprobs, s.ref_logprobs, strict=True)]
            returns.append(s.reward - 5.0 * sum(math.expm1(-d) + d for d in gaps))
        mean = sum(returns) / len(returns)
        assert [s.advantage for s in g.samples] == pytest.approx([x - mean for x in returns], rel=1e-6, abs=1e-9)
        assert {s.reward for s in g.samples} <= {0.0, 1.0}
    assert stats.metrics["kl/ref"] > 0
