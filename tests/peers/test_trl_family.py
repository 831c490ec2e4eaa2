"""The algorithms beyond plain GRPO against TRL 1.16.0's own trainers: losses, corrections, advantages, controllers.

As in `test_trl_loss.py`, TRL's `_compute_loss` and `_generate_and_score_completions` run on a tiny random Llama. Values
agree to 1e-6, gradients to 1e-6 of their largest entry over all parameters. The model is in float64; TRL computes the
log-probabilities and the loss in float32. Where TRL deviates, the test says so and compares what is left:

- RLOO: TRL clips the ratio of the whole sequence, as PPO does, and divides by no length; ours is the paper's REINFORCE
  with a constant divisor. On-policy the gradients agree up to that constant. Off-policy they agree where a sequence is
  one token: our ratio is each token's.
- Adaptive entropy: TRL's first step has no bonus (its last entropy is infinite until one was measured), ours starts
  with the configured one. Both use the previous step's entropy, where the paper has the current one's.
- Batch scale: a group with one scored sample has no advantages on either side; TRL counts its reward in the deviation
  of the batch, ours does not.
- Dual clip: TRL's `delta` also bounds the ratio of positive advantages. That changes nothing above 1 + clip_high.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cohort.algos import build_algorithm
from cohort.algos.advantages import STD_FLOOR, std_of
from cohort.algos.policy import overlong_penalty
from cohort.config.algo_sections import CorrectionConfig, KLConfig
from cohort.config.algos import CISPO, GRPO, GSPO, RLOO, SAPO, Policy
from cohort.types import Group, Prompt, Provenance, Sample
from tests.peers.trl_rows import (
    AGGREGATE,
    COMPLETION,
    ROWS,
    VOCAB,
    Rows,
    assert_equal,
    assert_equal_gradient,
    current,
    flat_inputs,
    make_group,
    make_rows,
    make_trainer,
    ours,
    save_model,
)

pytestmark = pytest.mark.peers

TOLERANCE = 1e-6
CLIP = {"clip_low": 0.1, "clip_high": 0.15}
EPSILON = {"epsilon": 0.1, "epsilon_high": 0.15}
SEQUENCE = {"importance_sampling_level": "sequence"}

# (settings of TRL, our config) by name
Loss = tuple[dict[str, Any], Callable[..., Policy]]
LOSSES: dict[str, Loss] = {
    "gspo": ({"loss_type": "grpo"} | SEQUENCE | EPSILON, lambda **s: GSPO(**CLIP, **s)),
    "gspo, token mean": ({"loss_type": "dapo"} | SEQUENCE | EPSILON, lambda **s: GSPO(aggregate="token", **CLIP, **s)),
    "gspo, constant": (
        {"loss_type": "dr_grpo"} | SEQUENCE | EPSILON,
        lambda **s: GSPO(aggregate="constant", **CLIP, **s),
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, lambda **s: CISPO(clip_high=1.3, **s)),
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_pos": 0.9, "sapo_temperature_neg": 1.3},
        lambda **s: SAPO(tau_pos=0.9, tau_neg=1.3, **s),
    ),
} | {
    f"dual clip, {loss_type}": (
        {"loss_type": loss_type, "delta": 1.5} | EPSILON,
        lambda aggregate=aggregate, **s: GRPO(dual_clip=1.5, aggregate=aggregate, **CLIP, **s),  # type: ignore[misc]
    )
    for loss_type, aggregate in AGGREGATE.items()
}
CASES: dict[str, dict[str, Any]] = {
    "on-policy": {},
    "several epochs": {"old": 0.5},
    "kl": {"old": 0.5, "ref": 0.6},
    "masked rows": {"old": 0.5, "ref": 0.6, "masked": (1, 3)},
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny-llama"))


def exact_trainer(*args: Any, **settings: Any) -> Any:
    """Returns a trainer whose model is in float64, so that differences are hardly rounding."""
    trainer = make_trainer(*args, **settings)
    trainer.model.double()
    if trainer.ref_model is not None:
        trainer.ref_model.double()
    return trainer


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_equal_trl(model_folder: Path, name: str, case: str) -> None:
    settings, build = LOSSES[name]
    beta = 0.07 if "ref" in CASES[case] else 0.0
    trainer = exact_trainer(model_folder, beta=beta, **settings)
    rows = make_rows(trainer, **CASES[case])
    theirs = trainer._compute_loss(trainer.model, rows.inputs)
    mine, tally = ours(trainer, rows, build(kl=KLConfig(weight=beta)))
    assert_equal(trainer, theirs, mine, TOLERANCE)

    metrics = tally.to_metrics()
    # The case has clipped and unclipped tokens.
    if case == "several epochs" and not name.startswith("sapo"):
        assert 0.0 < metrics.get("clip/low", 0.0) + metrics["clip/high"] < 1.0
    # The second clip acts too.
    if "dual" in name and case == "several epochs":
        assert metrics["ratio/max"] > 1.5
        plain, _ = ours(trainer, rows, GRPO(aggregate=build().aggregate, **CLIP))  # type: ignore[arg-type]
        assert abs(plain.item() - mine.item()) > 1e-3


CORRECTIONS = {
    "token_truncate": CorrectionConfig(kind="truncate", level="token", bounds=(0.6, 1.4)),
    "token_mask": CorrectionConfig(kind="mask", level="token", bounds=(0.6, 1.4)),
    "sequence_truncate": CorrectionConfig(kind="truncate", level="sequence", bounds=(0.5, 1.8)),
    "sequence_mask": CorrectionConfig(kind="mask", level="sequence", bounds=(0.3, 2.5)),
}
CORRECTED: dict[str, Loss] = {
    loss_type: (
        {"loss_type": loss_type} | EPSILON,
        lambda aggregate=aggregate, **s: GRPO(aggregate=aggregate, **CLIP, **s),  # type: ignore[misc]
    )
    for loss_type, aggregate in AGGREGATE.items()
} | {name: LOSSES[name] for name in ("gspo", "cispo", "sapo")}


@pytest.mark.parametrize("mode", CORRECTIONS)
@pytest.mark.parametrize("name", CORRECTED)
def test_sampler_correction_equals_trl(model_folder: Path, name: str, mode: str) -> None:
    """TRL's own path with completions as if sampled by vLLM: scored, corrected, and trained after further updates.

    Cut completions are masked and there is a KL to the reference, which neither side corrects.
    """
    settings, build = CORRECTED[name]
    correction = CORRECTIONS[mode]
    rewards = [1.0, 0.0, 0.3, 0.1, -1.0, 1.0]
    trainer = exact_trainer(
        model_folder,
        lambda completions, **_: rewards,
        beta=0.07,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=correction.bounds[0],
        vllm_importance_sampling_clip_max=correction.bounds[1],
        mask_truncated_completions=True,
        **settings,
    )
    rows = sampled_by_another_policy(trainer)
    shift(trainer)
    theirs = trainer._compute_loss(trainer.model, rows.inputs)
    mine, tally = ours(trainer, rows, build(kl=KLConfig(weight=0.07), correction=correction))
    assert_equal(trainer, theirs, mine, TOLERANCE)
    assert 0.0 < tally.to_metrics()["importance/bounded"] < 1.0
    assert (rows.inputs["completion_mask"].sum(1) == 0).sum() == 1  # the cut one


def sampled_by_another_policy(trainer: Any) -> Rows:
    """Returns the rows that TRL makes of fixed completions, with sampler logprobs near those of its model."""
    rng = torch.Generator().manual_seed(2)
    lengths = [7, 3, 2, 6, 7, 4]
    ids = [[*torch.randint(3, VOCAB, (n - 1,), generator=rng).tolist(), 1] for n in lengths]
    # Without an end-of-text token the completion counts as truncated.
    ids[1][-1] = 5
    logprobs: list[list[float]] = [[0.0] * n for n in lengths]
    trainer._generate_single_turn = lambda *_: (ids, logprobs)
    # Set after construction, because vLLM itself is not needed here.
    trainer.use_vllm = True
    batch = [{"prompt": f"w{i // 2 + 3} w9"} for i in range(ROWS)]
    old = trainer._generate_and_score_completions(batch)["old_per_token_logps"]  # of the same tokens
    for i, n in enumerate(lengths):
        logprobs[i] = (old[i, :n] + 0.4 * torch.randn(n, generator=rng)).tolist()
    inputs = trainer._generate_and_score_completions(batch)
    assert "importance_sampling_ratio" in inputs
    return Rows(inputs)


def shift(trainer: Any) -> None:
    """Moves the model as if by some updates."""
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight += 0.03 * torch.randn(weight.shape, generator=rng, dtype=weight.dtype)


# Rewards of two prompts. The last sample could not be scored.
REWARDS: list[float | None] = [1.0, 0.0, 0.25, 0.3, -2.0, None]


def test_batch_scale_equals_trl(model_folder: Path) -> None:
    """The baseline is the group's mean, the divisor the standard deviation of the batch's rewards."""
    theirs = scored(exact_trainer(model_folder, given, num_generations=3, scale_rewards="batch"))["advantages"]
    assert_same(advantages_of(GRPO(scale="batch")), theirs)


def test_batch_scale_of_trl_counts_a_lone_sample(model_folder: Path) -> None:
    """Shows that the named difference is the only one."""
    rewards = [1.0, 0.0, 0.25, 5.0, None, None]
    settings = {"num_generations": 3, "scale_rewards": "batch"}
    theirs = scored(exact_trainer(model_folder, lambda completions, **_: rewards, **settings))["advantages"]
    assert not theirs[3:].any()
    mine = advantages_of(GRPO(scale="batch"), rewards)
    assert not any(mine[3:])
    ratio = (std_of([1.0, 0.0, 0.25, 5.0]) + STD_FLOOR) / (std_of([1.0, 0.0, 0.25]) + STD_FLOOR)
    assert_same(mine, theirs * ratio)


def test_leave_one_out_equals_trl(model_folder: Path) -> None:
    theirs = scored(exact_trainer(model_folder, given, kind="RLOO", num_generations=3, beta=0.0))["advantages"]
    assert_same(advantages_of(RLOO()), theirs)


def test_leave_one_out_with_kl_in_the_reward_equals_trl(model_folder: Path) -> None:
    """k1 summed over the sample's tokens, as TRL's RLOO subtracts it."""
    trainer = exact_trainer(model_folder, given, kind="RLOO", num_generations=3, beta=0.05)
    shift(trainer)
    rows = Rows(scored(trainer))
    with torch.no_grad():
        (old, _), (ref, _) = current(trainer, rows), current(trainer, rows, trainer.ref_model)
    keep = rows.inputs["completion_mask"].bool()

    def sample(i: int) -> Sample:
        n, reward = int(keep[i].sum()), REWARDS[i]
        return Sample(
            tokens=[3] * n,
            provenance=[int(Provenance.SAMPLED)] * n,
            sampler_logprobs=[-1.0] * n,
            old_logprobs=old[i][keep[i]].tolist(),
            ref_logprobs=ref[i][keep[i]].tolist(),
            reward=reward,
            failure="unscorable" if reward is None else "",
        )

    groups = [Group(prompt=PROMPT, samples=[sample(i) for i in ids]) for ids in (range(3), range(3, 6))]
    config = RLOO(kl=KLConfig(weight=0.05, estimator="k1", place="reward"))
    graded = build_algorithm(config, COMPLETION).advantages(groups)
    mine = [s.advantage for g in graded for s in g.samples]
    assert_same(mine, rows.inputs["advantages"])
    assert abs(mine[0] - advantages_of(RLOO())[0]) > 1e-3  # the KL acts


PROMPT = Prompt(task="t", id="0", visit=0, row={}, messages=[], tokens=[3], provenance=[0])


def given(completions: list[str], **_: Any) -> list[float | None]:
    assert len(completions) == len(REWARDS)
    return REWARDS


def scored(trainer: Any) -> dict[str, Tensor]:
    batch = [{"prompt": prompt} for prompt in ("w3 w4", "w5 w6 w7") for _ in range(3)]
    return trainer._generate_and_score_completions(batch)  # type: ignore[no-any-return]


def advantages_of(config: Policy, rewards: Sequence[float | None] = REWARDS) -> list[float]:
    graded = build_algorithm(config, COMPLETION).advantages([make_group(rewards[:3]), make_group(rewards[3:])])
    return [s.advantage for g in graded for s in g.samples]


def assert_same(mine: list[float], theirs: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), theirs.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", ["on-policy", "off-policy, one token each"])
def test_rloo_gradient_equals_trl(model_folder: Path, case: str) -> None:
    """TRL's clip is opened wide; our constant divisor is taken out. See the deviation above."""
    trainer = exact_trainer(model_folder, kind="RLOO", beta=0.0, epsilon=0.99, epsilon_high=99.0)
    rows = make_rows(trainer) if case == "on-policy" else make_rows(trainer, old=0.5, lengths=[1] * ROWS)
    with torch.no_grad():
        old = rows.inputs.get("old_per_token_logps", current(trainer, rows)[0])
    rows.inputs["old_logps"] = (old * rows.inputs["completion_mask"]).sum(1)
    theirs = trainer._compute_loss(trainer.model, rows.inputs)
    mine, _ = ours(trainer, rows, RLOO())
    assert_equal_gradient(trainer, theirs, mine * COMPLETION, TOLERANCE)


def test_adaptive_entropy_equals_trl(model_folder: Path) -> None:
    """Fourteen steps while the entropy crosses the target and comes back; token mean, where the bonuses agree."""
    target, start = 2.5, 0.02
    adaptive = {"use_adaptive_entropy": True, "entropy_coef": start, "entropy_target": target}
    trainer = exact_trainer(model_folder, loss_type="bnpo", **adaptive)
    rows = make_rows(trainer)
    algo = build_algorithm(GRPO(aggregate="token", entropy=start, entropy_target=target), COMPLETION)
    head = trainer.model.lm_head.weight.detach().clone()
    seen: list[tuple[float, float]] = []
    for step, sharpness in enumerate([4.0, 4.0, 4.0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 4.0, 4.0]):
        trainer.model.lm_head.weight.data.copy_(sharpness * head)
        used = algo.coefficients.active_entropy  # type: ignore[attr-defined]
        theirs = trainer._compute_loss(trainer.model, rows.inputs)
        mine, tally = algo.loss(flat_inputs(trainer, rows, algo, rows.num_tokens))
        # The named difference: TRL has no bonus in its first step.
        if step == 0:
            mine, used = mine + start * flat_inputs(trainer, rows, algo, rows.num_tokens).entropy.mean(), 0.0
        assert_equal(trainer, theirs, mine, TOLERANCE)
        metrics = tally.to_metrics()
        seen.append((metrics["entropy"], used))
        algo.update_coefficients(metrics)
        assert algo.coefficients.entropy == pytest.approx(trainer.entropy_coef, abs=1e-12)  # type: ignore[attr-defined]
    assert any(entropy > target for entropy, _ in seen) and any(entropy < target for entropy, _ in seen)
    assert {used for _, used in seen[1:]} > {0.0} and trainer.entropy_coef > 0.0


@pytest.mark.parametrize(("longest", "buffer"), [(100, 20), (7, 2), (64, 64)])
def test_overlong_penalty_equals_trl(longest: int, buffer: int) -> None:
    from trl.rewards import get_soft_overlong_punishment

    lengths = range(longest + 5)
    theirs = get_soft_overlong_punishment(longest, buffer)([[3] * n for n in lengths])
    mine = [-overlong_penalty(n, longest, buffer / longest) for n in lengths]
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=0.0, atol=1e-6)
