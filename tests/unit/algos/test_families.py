"""Every policy loss, baseline, correction and adjusted coefficient, by hand."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from torch import Tensor

from cohort.algos import build_algorithm
from cohort.algos.account import count_fates
from cohort.algos.advantages import best_of_k_gains, compute_advantages
from cohort.algos.inputs import LossInputs
from cohort.algos.policy import overlong_penalty
from cohort.config.algo_sections import CorrectionConfig, KLConfig
from cohort.config.algos import (
    CISPO,
    DAPO,
    GMPO,
    GRPO,
    GSPO,
    RLOO,
    SAPO,
    GSPOToken,
    PassAtK,
    Policy,
    Reinforce,
    ReinforcePP,
    ReinforcePPBaseline,
)
from cohort.fates import Fate
from cohort.types import Finish, Group
from tests.helpers.decoders_and_groups import make_group, make_sample

OLD = -1.0


def inputs(
    ratios: list[float],
    A: list[float],
    segments: list[int] | None = None,
    sampler: list[float] | None = None,
    ref: list[float] | None = None,
) -> LossInputs:
    """Returns tokens with these ratios to an old policy that gave each a log-probability of -1."""

    def vector(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    size = len(ratios)
    return LossInputs(
        logprobs=vector([OLD + math.log(r) for r in ratios]).requires_grad_(),
        entropy=torch.zeros(size, dtype=torch.float64, requires_grad=True),
        old_logprobs=torch.full((size,), OLD, dtype=torch.float64),
        ref_logprobs=None if ref is None else vector(ref),
        sampler_logprobs=vector(sampler or [OLD] * size),
        advantages=vector(A),
        weights=torch.ones(size, dtype=torch.float64),
        segments=torch.tensor(segments or list(range(size))),
    )


def evaluate_loss(config: Policy, x: LossInputs) -> tuple[float, list[float], dict[str, float]]:
    """Returns the loss, its gradient on the log-probabilities, and the metrics."""
    loss, tally = build_algorithm(config, 8).loss(x)
    return loss.item(), torch.autograd.grad(loss, x.logprobs)[0].tolist(), tally.to_metrics()


# ---- policy losses


def test_dual_clip_bounds_what_a_bad_sample_costs():
    """A = -1 at ratio 5: PPO pays 5, with dual clip 3 and no gradient; a positive advantage is untouched."""
    x = inputs([5.0, 5.0, 2.0], [-1.0, 1.0, -1.0])
    value, slope, metrics = evaluate_loss(GRPO(dual_clip=3.0), x)
    assert value == pytest.approx(3.0 - 1.2 + 2.0)
    assert slope == pytest.approx([0.0, 0.0, 2.0])
    # These are the two tokens without gradient.
    assert metrics["clip/high"] == pytest.approx(2 / 3)


def test_gspo_has_one_ratio_per_sample():
    """Ratios 2 and 8 of one sample have the geometric mean 4; 1.1 is alone. Clips at 0.5 and 10 act on neither."""
    config = GSPO(clip_low=0.5, clip_high=9.0)
    x = inputs([2.0, 8.0, 1.1], [1.0, 1.0, -1.0], [0, 0, 1])
    value, slope, metrics = evaluate_loss(config, x)
    assert value == pytest.approx(-4.0 - 4.0 + 1.1)
    # each of both tokens' terms moves with half of each token's log-probability
    assert slope == pytest.approx([-4.0, -4.0, 1.1])
    assert (metrics["ratio/max"], metrics["ratio/min"]) == pytest.approx((4.0, 1.1))
    held = evaluate_loss(GSPO(clip_low=0.1, clip_high=0.1), inputs([2.0, 8.0, 0.5], [1.0, 1.0, -1.0], [0, 0, 1]))
    assert held[0] == pytest.approx(-1.1 - 1.1 + 0.9) and held[1] == [0.0, 0.0, 0.0]
    assert held[2]["clip/high"] == pytest.approx(2 / 3) and held[2]["clip/low"] == pytest.approx(1 / 3)


def test_gspo_token_has_gspos_value_and_each_tokens_own_gradient():
    # This form allows advantages that differ by token.
    x = inputs([2.0, 8.0], [1.0, 3.0], [0, 0])
    value, slope, _ = evaluate_loss(GSPOToken(clip_low=0.5, clip_high=9.0), x)
    assert value == pytest.approx(-4.0 - 12.0)
    assert slope == pytest.approx([-4.0, -12.0])


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    """The clip is at log-ratio 0.4: of log-ratios 1.0 and 0.2 with A > 0 the first is clipped; the mean is 0.3."""
    x = inputs([math.exp(1.0), math.exp(0.2)], [2.0, 2.0], [0, 0])
    value, slope, metrics = evaluate_loss(GMPO(), x)
    term = -2.0 * math.exp((0.4 + 0.2) / 2)
    assert value == pytest.approx(2 * term)
    # Each of the two terms moves with half of the token's log-ratio.
    assert slope == pytest.approx([0.0, term])
    assert metrics["clip/high"] == 0.5 and metrics["clip/low"] == 0.0
    # A < 0: only a ratio that has fallen too far is clipped
    value, slope, metrics = evaluate_loss(GMPO(), inputs([math.exp(1.0), math.exp(-1.0)], [-1.0, -1.0], [0, 0]))
    assert value == pytest.approx(2 * math.exp((1.0 - 0.4) / 2))
    assert slope[1] == 0.0 and slope[0] > 0 and metrics["clip/low"] == 0.5


def test_cispo_caps_the_ratio_and_keeps_the_gradient():
    x = inputs([9.0, 2.0, 0.5], [1.0, -1.0, 2.0])
    value, slope, metrics = evaluate_loss(CISPO(clip_high=5.0), x)
    logprobs = x.logprobs.tolist()
    assert value == pytest.approx(-5.0 * logprobs[0] + 2.0 * logprobs[1] - 0.5 * 2.0 * logprobs[2])
    assert slope == pytest.approx([-5.0, 2.0, -1.0])
    assert metrics["clip/high"] == pytest.approx(1 / 3)


def test_sapo_is_ppo_at_ratio_one_and_fades_away_from_it():
    value, slope, _ = evaluate_loss(SAPO(), inputs([1.0, 1.0], [2.0, -3.0]))
    # 4 / tau sigmoid(0) = 2 / tau.
    assert value == pytest.approx(-2.0 * 2.0 / 1.0 + 3.0 * 2.0 / 1.05)
    assert slope == pytest.approx([-2.0, 3.0])
    r, tau = 3.0, 1.05
    s = 1.0 / (1.0 + math.exp(-tau * (r - 1.0)))
    value, slope, _ = evaluate_loss(SAPO(), inputs([r], [-1.0]))
    assert value == pytest.approx(4.0 / tau * s)
    assert slope == pytest.approx([4.0 * s * (1.0 - s) * r]) and slope[0] < r


@pytest.mark.parametrize("config", [Reinforce(), RLOO()])
def test_the_score_function_is_weighted_with_a_ratio_that_has_no_gradient(config):
    x = inputs([1.0, 2.0], [3.0, -1.0])
    value, slope, _ = evaluate_loss(config, x)
    assert value == pytest.approx(3.0 * 1.0 + 2.0 * (math.log(2.0) - 1.0))
    assert slope == pytest.approx([-3.0, 2.0])


# ---- correction


def correction_factors(kind: str, level: str, bounds: tuple[float, float], sampler: list[float]) -> list[float]:
    """Returns the factors of the policy term's gradient, for two tokens of one sample and one of another."""
    x = inputs([1.0, 1.0, 1.0], [-1.0, -1.0, -1.0], [0, 0, 1], sampler=sampler)
    config = GRPO(correction=CorrectionConfig(kind=kind, level=level, bounds=bounds))
    return evaluate_loss(config, x)[1]


# old - sampler of the tokens: log 2, log 8; log 1/4
SAMPLER = [OLD - math.log(2), OLD - math.log(8), OLD + math.log(4)]


@pytest.mark.parametrize(
    ("level", "raw"),
    [("token", [2.0, 8.0, 0.25]), ("sequence", [16.0, 16.0, 0.25]), ("geometric", [4.0, 4.0, 0.25])],
)
def test_importance_ratios_by_level(level, raw):
    assert correction_factors("truncate", level, (0.0, 100.0), SAMPLER) == pytest.approx(raw)
    assert correction_factors("truncate", level, (0.5, 3.0), SAMPLER) == pytest.approx(
        [min(3.0, max(0.5, w)) for w in raw]
    )
    masked = [w if 0.5 <= w <= 5.0 else 0.0 for w in raw]
    assert correction_factors("mask", level, (0.5, 5.0), SAMPLER) == pytest.approx(masked)


def test_metrics_of_the_correction():
    config = GRPO(correction=CorrectionConfig(kind="mask", bounds=(0.5, 5.0)))
    metrics = evaluate_loss(config, inputs([1.0] * 3, [1.0] * 3, sampler=SAMPLER))[2]
    assert metrics["importance/mean"] == pytest.approx(2.0 / 3) and metrics["importance/square"] == pytest.approx(4 / 3)
    assert metrics["importance/bounded"] == pytest.approx(2 / 3)
    assert (metrics["importance/min"], metrics["importance/max"]) == pytest.approx((0.25, 8.0))


def test_the_correction_leaves_kl_alone():
    config = GRPO(kl=KLConfig(weight=1.0, estimator="k1"), correction=CorrectionConfig(kind="truncate"))
    _, slope, _ = evaluate_loss(config, inputs([1.0], [0.0], sampler=[OLD - 5.0], ref=[-1.5]))
    assert slope == pytest.approx([1.0])


def test_old_data_are_corrected_to_the_start_of_the_step_and_clipped_from_there():
    """Decoupled PPO: ratio 1.5 to the step's start is clipped at 1.2, although the sampler is far away."""
    config = GRPO(correction=CorrectionConfig(kind="truncate", bounds=(0.0, 10.0)))
    value, slope, _ = evaluate_loss(config, inputs([1.5, 1.1], [1.0, 1.0], sampler=[OLD - math.log(3)] * 2))
    assert value == pytest.approx(-3.0 * 1.2 - 3.0 * 1.1)
    assert slope == pytest.approx([0.0, -3.3])


# ---- KL


@pytest.mark.parametrize(("estimator", "slope"), [("k1", 1.0), ("k2", -0.5), ("k3", 1 - math.exp(0.5)), ("abs", -1.0)])
def test_kl_to_the_sampler(estimator, slope):
    config = GRPO(kl=KLConfig(weight=2.0, to="sampler", estimator=estimator))
    assert build_algorithm(config, 8).needs() == set()  # no reference is kept
    assert evaluate_loss(config, inputs([1.0], [0.0], sampler=[-0.5]))[1] == pytest.approx([2.0 * slope])


def test_a_kl_coefficient_follows_its_target():
    algo = build_algorithm(GRPO(kl=KLConfig(weight=0.1, target=0.02)), 8)
    # The returned coefficient is that of the step that measured the KL.
    assert algo.update_coefficients({"kl/ref": 0.021}) == {"kl/weight": 0.1}
    assert algo.state()["kl"] == pytest.approx(0.1 * (1 + 0.1 * 0.05))
    algo.update_coefficients({"kl/ref": 5.0})
    algo.update_coefficients({"kl/ref": 0.0})
    assert algo.state()["kl"] == pytest.approx(0.1 * 1.005 * 1.02 * 0.98)
    x = inputs([1.0], [0.0], ref=[-1.5])
    loss, _ = algo.loss(x)
    assert loss.item() == pytest.approx(algo.state()["kl"] * (math.exp(-0.5) - 0.5))
    other = build_algorithm(GRPO(kl=KLConfig(weight=0.1, target=0.02)), 8)
    other.load_state(algo.state())
    assert other.state() == algo.state()


def test_an_entropy_bonus_follows_its_target():
    algo = build_algorithm(GRPO(entropy_target=0.5), 8)
    assert algo.update_coefficients({"entropy": 0.3}) == {"entropy/weight": 0.0}
    assert algo.update_coefficients({"entropy": 0.3}) == {"entropy/weight": 0.005}
    assert algo.update_coefficients({"entropy": 0.9}) == {"entropy/weight": 0.01}
    # The entropy was above the target, so there was no bonus.
    assert algo.update_coefficients({"entropy": 0.4}) == {"entropy/weight": 0.0}
    assert algo.update_coefficients({}) == {"entropy/weight": 0.01}


# ---- advantages


def graded(config: Policy, *rewards: list[float], **sample: object) -> list[Group]:
    """Returns one group per list of rewards, after `advantages`. Sample number n has n tokens."""
    groups = [
        make_group([3], [make_sample([4] * n, reward=r, **sample) for n, r in enumerate(row, 1)], id=str(i))
        for i, row in enumerate(rewards)
    ]
    return build_algorithm(config, 10).advantages(groups)


def advantages_of(groups: list[Group]) -> list[list[float]]:
    """Returns the advantages of the samples, per group."""
    return [[s.advantage for s in g.samples] for g in groups]


def test_leave_one_out_by_hand():
    assert advantages_of(graded(RLOO(), [4.0, 1.0, 1.0])) == [[3.0, -1.5, -1.5]]


def test_the_batchs_mean_and_deviation():
    rows = [1.0, 0.0], [1.0, 1.0]
    std = statistics.stdev([1.0, 0.0, 1.0, 1.0])
    assert advantages_of(graded(Reinforce(), *rows)) == [[0.25, -0.75], [0.25, 0.25]]
    expected = [[0.25 / (std + 1e-4), -0.75 / (std + 1e-4)], [0.25 / (std + 1e-4)] * 2]
    assert advantages_of(graded(ReinforcePP(), *rows)) == [pytest.approx(row) for row in expected]
    groups = graded(GRPO(scale="batch"), *rows)
    assert advantages_of(groups) == [pytest.approx([0.5 / (std + 1e-4), -0.5 / (std + 1e-4)]), [0.0, 0.0]]
    assert [g.excluded for g in groups] == ["", Fate.CONSTANT_REWARD]
    # REINFORCE++ with a baseline: the deviation of what is left after it
    left = statistics.stdev([0.5, -0.5, 0.0, 0.0])
    found = advantages_of(graded(ReinforcePPBaseline(), *rows))
    assert found == [pytest.approx([0.5 / (left + 1e-4), -0.5 / (left + 1e-4)]), [0.0, 0.0]]
    # With a baseline over the batch, a group of equal rewards has advantages.
    assert not any(g.excluded for g in graded(Reinforce(), *rows))


def test_scaled_by_the_mean():
    """MaxRL: a rare success weighs more."""
    [rare], [common] = (
        advantages_of(graded(GRPO(scale="mean"), [1, 0, 0, 0])),
        advantages_of(graded(GRPO(scale="mean"), [1, 1, 1, 0])),
    )
    assert rare == pytest.approx([0.75 / 0.2501, *[-0.25 / 0.2501] * 3])
    assert rare[0] > common[0]


def test_scaled_by_the_mean_of_rewards_of_both_signs():
    [row] = advantages_of(graded(GRPO(scale="mean"), [1.0, -1.0, 1.0, -1.0]))
    assert row == pytest.approx([1 / 1.0001, -1 / 1.0001, 1 / 1.0001, -1 / 1.0001])


def best_by_definition(rewards: list[float], k: int) -> list[float]:
    """Returns what each sample adds to the best of k, from all subsets of size k."""
    subsets = list(itertools.combinations(range(len(rewards)), k))

    def gain(i: int, subset: tuple[int, ...]) -> float:
        return max(rewards[j] for j in subset) - max(rewards[j] for j in subset if j != i)

    return [math.fsum(gain(i, s) for s in subsets if i in s) / len(subsets) for i in range(len(rewards))]


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("rewards", [[1, 0, 0, 0, 0], [1, 1, 0, 1, 0], [0.3, 0.9, 0.9, -1.0, 0.1], [2.0] * 5])
def test_best_of_k_is_its_definition(rewards, k):
    assert best_of_k_gains(rewards, k) == pytest.approx(best_by_definition(rewards, k))


def test_pass_at_k_stops_caring_once_the_group_succeeds():
    [groups] = [graded(PassAtK(k=2), [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0])]
    first, second = advantages_of(groups)
    # The first sample alone decides three of six pairs.
    assert first == pytest.approx([0.5, 0.0, 0.0, 0.0])
    assert second == pytest.approx([1 / 6, 1 / 6, 1 / 6, 0.0])


def test_advantages_of_a_batch_baseline_do_not_depend_on_the_order():
    rows = [[0.1, 0.7], [0.3, 0.2], [0.15]]
    assert compute_advantages(rows, "batch", "batch") == compute_advantages(rows[::-1], "batch", "batch")[::-1]
    assert compute_advantages(rows, "centred", "mean") == compute_advantages(rows[::-1], "centred", "mean")[::-1]


# ---- dead groups, long completions


def test_dead_groups_count_or_do_not_or_are_refilled():
    rows = [1.0, 0.0], [1.0, 1.0]
    assert [g.excluded for g in graded(GRPO(), *rows)] == ["", Fate.CONSTANT_REWARD]
    assert [g.excluded for g in graded(GRPO(dead="drop"), *rows)] == ["", Fate.EQUAL_REWARDS]
    with_kl = graded(GRPO(dead="drop", kl=KLConfig(weight=0.1)), *rows)
    # The group is dropped by choice, although the KL would train it.
    assert [g.excluded for g in with_kl] == ["", Fate.EQUAL_REWARDS]
    algo = build_algorithm(DAPO(overlong=0.9), 10)
    # by what the task paid: lengths differ, and with them what the baseline would see
    assert [algo.accept(g) for g in graded(GRPO(), *rows)] == [True, False]
    counted = count_fates(graded(GRPO(dead="drop"), *rows))
    assert counted["groups/equal_rewards"] == 1 and "groups/dead" not in counted  # that name is a share


def test_a_group_that_adds_nothing_to_the_best_of_k_is_not_a_constant_one():
    groups = graded(PassAtK(k=4), [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0])
    assert [g.excluded for g in groups] == [Fate.NO_GAIN, Fate.CONSTANT_REWARD]
    algo = build_algorithm(PassAtK(k=4, dead="refill"), 10)
    assert [algo.accept(g) for g in graded(GRPO(), [1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0])] == [False, True]


def test_one_sample_is_a_group_where_the_baseline_is_the_batchs():
    groups = graded(Reinforce(), [1.0], [0.0])
    assert advantages_of(groups) == [[0.5], [-0.5]] and not any(g.excluded for g in groups)
    assert [g.excluded for g in graded(RLOO(), [1.0], [0.0])] == ["too few scored samples"] * 2


def test_overlong_completions_lose_reward_before_they_are_cut():
    """max_tokens 10, the last half of it: lengths 1 to 9 lose (n - 5) / 5 beyond 5."""
    assert [overlong_penalty(n, 10, 0.5) for n in (5, 6, 10, 11)] == pytest.approx([0.0, 0.2, 1.0, 1.0])
    algo = build_algorithm(DAPO(overlong=0.5), 10)
    sample = make_sample([4] * 8, reward=1.0, finish=Finish.STOP)
    assert algo.compute_returns(sample) == pytest.approx([1.0 - 0.6]) and sample.reward == 1.0


def test_only_kl_in_the_reward_and_a_reference_need_logprobs_before_advantages():
    def needs(config: Policy) -> set[str]:
        return set(build_algorithm(config, 8).needs())

    assert needs(CISPO()) == set()
    assert needs(ReinforcePP(kl=KLConfig(weight=0.1, estimator="k1", place="reward"))) == {"old", "ref"}
    assert needs(GRPO(kl=KLConfig(weight=0.1, to="sampler", place="reward"))) == {"old"}
