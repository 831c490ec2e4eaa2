"""Intervals worked out by hand, pass@k by enumeration, paired tests against exact counts."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from cohort.evaluation.statistics import accuracy, all_passes, bootstrap, interval, paired, pass_at_k


def test_wilson_interval_by_hand():
    # 3 of 4, z = 1.96: centre (0.75 + 0.4802) / (1 + 0.9604) = 0.62752; half = 1.96 sqrt(0.046875 + 0.060025) / 1.9604
    low, high = interval([[1.0], [1.0], [0.0], [1.0]])
    assert (low, high) == pytest.approx((0.30064, 0.95441), abs=2e-5)


def wilson(p: float, n: float) -> tuple[float, float]:
    z = 1.959963984540054
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (p + z * z / (2 * n) - half) / (1 + z * z / n), (p + z * z / (2 * n) + half) / (1 + z * z / n)


def test_interval_of_several_samples_is_over_problems():
    # means 1, 0.5, 0, 0.5 and one problem half right, half wrong: mean 0.5, squares 0.5 + 0.25, over 4; the mean of
    # five has variance 0.0375, that of 0.25 / 0.0375 = 6 2/3 independent answers
    rows = [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    assert interval(rows) == pytest.approx(wilson(0.5, 20 / 3), abs=1e-12)
    assert interval([[1.0] * 9, [0.0]]) == pytest.approx(wilson(0.5, 2), abs=1e-12)  # each problem counts once


def test_answers_are_worth_no_more_than_there_are():
    rows = [[1.0, 0.0]] * 50
    assert interval(rows) == pytest.approx(wilson(0.5, 100), abs=1e-12)


def test_a_first_mistake_does_not_make_it_sure():
    """The interval of 240 right answers of 240 and that of 239 lie near each other."""
    right, slip = interval([[1.0] * 8] * 30), interval([[1.0] * 8] * 29 + [[1.0] * 7 + [0.0]])
    assert right == pytest.approx(wilson(1.0, 30), abs=1e-12)
    assert abs(right[0] - slip[0]) < 0.02 and slip[1] < 1.0


def test_interval_at_the_ends_says_how_little_few_problems_tell():
    low, high = interval([[1.0]] * 5)
    assert high == 1.0 and low == pytest.approx(5 / (5 + 3.8414588), abs=1e-6)
    assert interval([[1.0, 1.0]] * 5) == pytest.approx((low, high))  # no spread between problems is not certainty
    assert interval([[0.0]] * 5) == pytest.approx((0.0, 1 - low), abs=1e-12)
    assert interval([]) == (0.0, 1.0)


def test_interval_covers_the_truth_about_95_times_in_100():
    rng, hits, trials = random.Random(0), 0, 2000
    for _ in range(trials):
        low, high = interval([[float(rng.random() < 0.3)] for _ in range(40)])
        hits += low <= 0.3 <= high
    assert 0.93 < hits / trials < 0.97


def even(alpha: float, beta: float):
    return alpha / (alpha + beta), lambda rng: rng.betavariate(alpha, beta)


def broken(share: float, slips: float):
    """Some problems that nobody solves, and slips on the others."""
    return (1 - share) * (1 - slips), lambda rng: 0.0 if rng.random() < share else 1.0 - slips


CHANCES = {
    "hard": even(0.05, 0.5),
    "easy": even(0.5, 0.05),
    "all or nothing": even(0.3, 0.3),
    "alike": even(20, 20),
    "nearly all right": even(50, 2),
    "broken problems": broken(0.05, 0.005),
    "fewer": broken(0.03, 0.003),
    "and slips": broken(0.05, 0.02),
}


@pytest.mark.parametrize("kind", CHANCES)
def test_interval_of_avg_at_n_covers_the_truth(kind):
    """Thirty problems (AIME), eight samples each: where few of them disagree, their spread alone would say too much."""
    truth, chance = CHANCES[kind]
    rng, hits, trials = random.Random(0), 0, 1000
    for _ in range(trials):
        chances = [chance(rng) for _ in range(30)]
        low, high = interval([[float(rng.random() < c) for _ in range(8)] for c in chances])
        hits += low <= truth <= high
    assert hits / trials > 0.93


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(k):
    rows = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0, 0]]
    shares = []
    for row in rows:
        subsets = list(itertools.combinations(row, k))
        shares.append(sum(any(s) for s in subsets) / len(subsets))
    assert pass_at_k([[float(x) for x in row] for row in rows], k) == pytest.approx(sum(shares) / 4, abs=1e-12)


def test_pass_at_k_leaves_out_problems_with_fewer_samples():
    assert pass_at_k([[1.0], [0.0, 0.0]], 2) == 0.0
    assert pass_at_k([[1.0]], 2) == 0.0
    assert pass_at_k([[1.0], [0.0, 1.0]], 1) == 0.75


def test_accuracy_counts_every_problem_once():
    assert accuracy([[1.0, 0.0], [1.0], [], [0.0, 0.0, 0.0]]) == pytest.approx((0.5 + 1 + 0) / 3, abs=1e-12)
    assert accuracy([]) == 0.0


def test_all_passes_go_up_to_the_number_of_samples():
    rows = [[1.0, 0.0, 0.0, 0.0, 0.0]] * 3 + [[1.0] * 5]
    assert [(p.k, round(p.value, 12)) for p in all_passes(rows)] == [(2, 0.55), (4, 0.85)]
    assert all(p.low <= p.value <= p.high for p in all_passes(rows)) and not all_passes([[1.0]])


def test_bootstrap_covers_the_truth_about_95_times_in_100():
    rng, hits, trials = random.Random(1), 0, 150
    for _ in range(trials):
        low, high = bootstrap([rng.random() ** 2 for _ in range(40)])  # of mean 1/3
        hits += low <= 1 / 3 <= high
    assert 0.88 < hits / trials < 0.99
    assert bootstrap([0.5]) == (0.5, 0.5) and bootstrap([]) == (0.0, 1.0)
    assert bootstrap([0.0, 1.0, 1.0]) == bootstrap([0.0, 1.0, 1.0])


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (5, 1), (3, 3), (9, 0), (20, 8)])
def test_mcnemar_is_the_share_of_coins_as_uneven(wins, losses):
    first = [[0.0]] * wins + [[1.0]] * losses + [[1.0], [0.0]]
    second = [[1.0]] * wins + [[0.0]] * losses + [[1.0], [0.0]]
    found = paired(first, second)
    n, far = wins + losses, abs(wins - losses)
    exact = sum(math.comb(n, k) for k in range(n + 1) if abs(2 * k - n) >= far) / 2**n
    assert (found.wins, found.losses, found.test) == (wins, losses, "exact McNemar")
    assert found.p == pytest.approx(exact, abs=1e-12)
    assert found.mean == pytest.approx((wins - losses) / len(first), abs=1e-12)


def test_many_differences_are_counted_by_the_normal_law():
    first, second = [[0.0]] * 1100 + [[1.0]] * 1000, [[1.0]] * 1100 + [[0.0]] * 1000
    exact = 2 * sum(math.comb(2100, k) for k in range(1001)) / 2**2100
    assert paired(first, second).p == pytest.approx(exact, rel=0.02)


def test_several_samples_are_compared_by_sign_flips():
    first = [[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    second = [[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]
    gains = [0.5, 0.5, -0.5, 1.0]
    sums = [
        abs(sum(s * g for s, g in zip(signs, gains, strict=True))) for signs in itertools.product((-1, 1), repeat=4)
    ]
    exact = sum(x >= abs(sum(gains)) - 1e-12 for x in sums) / 16
    found = paired(first, second)
    assert found.test == "sign flips" and found.p == pytest.approx(exact, abs=0.02)
    spread = math.sqrt(sum((g - 0.375) ** 2 for g in gains) / 3 / 4)
    assert (found.mean, found.high) == pytest.approx((0.375, 0.375 + 1.959963984540054 * spread), abs=1e-12)


def test_a_p_value_is_below_5_percent_about_5_times_in_100_without_a_difference():
    rng, few = random.Random(0), 0
    for _ in range(400):
        rows = [[[float(rng.random() < 0.5)] for _ in range(60)] for _ in range(2)]
        few += paired(*rows).p < 0.05
    assert few / 400 < 0.06
