"""State that some algorithms add to a run: adjusted coefficients, a reference that moves, and replayed rollouts."""

from __future__ import annotations

import pytest
import torch

from cohort.config.algo_sections import CorrectionConfig, KLConfig
from cohort.config.algos import GRPO
from cohort.config.schema import (
    BatchConfig,
    EvalConfig,
    LearnerConfig,
    LoraConfig,
    OptimConfig,
    ReplayConfig,
    SaveConfig,
)
from cohort.errors import ConfigError
from cohort.jobs import build
from cohort.models.files import load_folder
from cohort.run.store.reader import Reader
from cohort.run.store.rollouts import load_rollouts, make_rollout_path
from tests.helpers.small_runs import built_job, keep_torch_settings, run_steps, small_run

STEERED = GRPO(
    kl=KLConfig(weight=0.05, target=1e-4, refresh=2),
    entropy_target=5.0,
    correction=CorrectionConfig(kind="truncate"),
)


def long_run(steps: int):
    """Returns the config of a run with all of that state."""
    return small_run(
        steps=steps,
        algo=STEERED,
        replay=ReplayConfig(prompts=2, steps=2),
        optim=OptimConfig(lr=1e-3),
        learner=LearnerConfig(token_budget=512, minibatches=2),
        batch=BatchConfig(prompts=4, samples=4),
        eval=EvalConfig(problems=4),
        save=SaveConfig(every=3, keep_last=9),
    )


def metrics(path):
    """Returns the metrics of a run by (step, name), without clock times."""
    with Reader(path / "run.db") as reader:
        return {(r.step, r.name): r.value for r in reader.read_metrics() if not r.name.startswith("time/")}


def test_a_resumed_run_continues_exactly_with_that_state(tmp_path):
    with keep_torch_settings():
        whole = build.train(long_run(5), tmp_path / "a", "plain")
        cut = build.train(long_run(3), tmp_path / "b", "plain")
        build.resume(cut, 5, "plain")
    ours, theirs = metrics(cut), metrics(whole)
    # Evaluations differ: the shorter run was evaluated at its own end too.
    assert {k: v for k, v in ours.items() if "eval" not in k[1]} == {
        k: v for k, v in theirs.items() if "eval" not in k[1]
    }
    one, other = (load_folder(p / "checkpoints" / "step-000005" / "model").decoder for p in (whole, cut))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    found = metrics(whole)
    assert [found[s, "kl/weight"] for s in (1, 2)] != [0.05, 0.05] and found[1, "kl/weight"] == 0.05
    assert (1, "replay/groups") not in found and found[5, "replay/groups"] == 2
    assert 1 <= found[5, "replay/age"] <= found[5, "replay/age_max"] <= 2
    assert 0 < found[5, "importance/ess"] <= 1 + 1e-12
    stored = load_rollouts(make_rollout_path(whole / "rollouts", 5))
    assert sorted(g.reused > 0 for g in stored) == [False] * 4 + [True] * 2
    assert all(s.old_logprobs is not None for g in stored if not g.excluded for s in g.samples if s.num_sampled)


def test_the_reference_becomes_the_current_policy_after_refresh_steps():
    config = small_run(algo=GRPO(kl=KLConfig(weight=0.05, refresh=2)), optim=OptimConfig(lr=1e-3))
    with built_job(config) as parts:
        reference = parts.learner.reference
        assert reference is not None
        first = reference.embed.clone()
        run_steps(parts, 1)
        assert torch.equal(reference.embed, first) and not torch.equal(parts.model.decoder.embed, first)
        run_steps(parts, 1, first=1)
        assert torch.equal(reference.embed, parts.model.decoder.embed)
        run_steps(parts, 1, first=2)
        assert not torch.equal(reference.embed, parts.model.decoder.embed)
        assert reference.embed.data_ptr() != parts.model.decoder.embed.data_ptr()


def test_adapters_have_no_reference_that_could_move():
    from cohort.config.load import change_config

    config = small_run(learner=LearnerConfig(lora=LoraConfig(rank=2)), algo=GRPO(kl=KLConfig(weight=0.1, refresh=2)))
    with pytest.raises(ConfigError, match="needs a copy of the reference"):
        change_config(config)


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_kl_to_the_sampler_needs_no_reference(weight):
    with built_job(small_run(algo=GRPO(kl=KLConfig(weight=weight, to="sampler")))) as parts:
        assert parts.learner.reference is None
        [(_, stats)] = run_steps(parts, 1)
        assert abs(stats.metrics["kl/sampler"]) < 1e-6
        assert ("loss/kl" in stats.metrics) == (weight > 0)
