"""Statistics: intervals are compared with values by hand, pass@k with enumeration, paired tests with exact counts."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from cohort.evaluation.statistics import (
    accuracy_interval,
    bootstrap_interval,
    compare_paired,
    compute_accuracy,
    compute_all_pass_at_k,
    compute_pass_at_k,
)


def test_wilson_interval_by_hand():
    # 3 of 4, z = 1.96: centre (0.75 + 0.4802) / (1 + 0.9604) = 0.62752; half = 1.96 sqrt(0.046875 + 0.060025) / 1.9604
    low, high = accuracy_interval([[1.0], [1.0], [0.0], [1.0]])
    assert (low, high) == pytest.approx((0.30064, 0.95441), abs=2e-5)


def wilson(p: float, n: float) -> tuple[float, float]:
    z = 1.959963984540054
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (p + z * z / (2 * n) - half) / (1 + z * z / n), (p + z * z / (2 * n) + half) / (1 + z * z / n)


def test_interval_of_several_samples_is_over_problems():
    # means 1, 0.5, 0, 0.5 and one problem half right, half wrong: mean 0.5, squares 0.5 + 0.25, over 4; the mean of
    # five has variance 0.0375, that of 0.25 / 0.0375 = 6 2/3 independent answers
    rows = [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    assert accuracy_interval(rows) == pytest.approx(wilson(0.5, 20 / 3), abs=1e-12)
    assert accuracy_interval([[1.0] * 9, [0.0]]) == pytest.approx(
        wilson(0.5, 2), abs=1e-12
    )  # each problem counts once, whatever its number of samples


def test_the_effective_number_of_answers_is_at_most_their_number():
    rows = [[1.0, 0.0]] * 50
    assert accuracy_interval(rows) == pytest.approx(wilson(0.5, 100), abs=1e-12)


def test_one_mistake_changes_the_interval_little():
    """The interval of 240 right answers of 240 and that of 239 lie near each other."""
    right, slip = accuracy_interval([[1.0] * 8] * 30), accuracy_interval([[1.0] * 8] * 29 + [[1.0] * 7 + [0.0]])
    assert right == pytest.approx(wilson(1.0, 30), abs=1e-12)
    assert abs(right[0] - slip[0]) < 0.02 and slip[1] < 1.0


def test_interval_of_few_problems_that_agree_is_wide():
    low, high = accuracy_interval([[1.0]] * 5)
    assert high == 1.0 and low == pytest.approx(5 / (5 + 3.8414588), abs=1e-6)
    assert accuracy_interval([[1.0, 1.0]] * 5) == pytest.approx(
        (low, high)
    )  # problems that all agree do not prove certainty
    assert accuracy_interval([[0.0]] * 5) == pytest.approx((0.0, 1 - low), abs=1e-12)
    assert accuracy_interval([]) == (0.0, 1.0)


def test_interval_covers_the_truth_about_95_times_in_100():
    rng, hits, trials = random.Random(0), 0, 2000
    for _ in range(trials):
        low, high = accuracy_interval([[float(rng.random() < 0.3)] for _ in range(40)])
        hits += low <= 0.3 <= high
    assert 0.93 < hits / trials < 0.97


def beta_chances(alpha: float, beta: float):
    """Returns the true accuracy, and a function that draws a problem's chance of a right answer."""
    return alpha / (alpha + beta), lambda rng: rng.betavariate(alpha, beta)


def chances_with_unsolvable(share: float, slips: float):
    """As `beta_chances`: a share of the problems is never solved, the others fail with the probability `slips`."""
    return (1 - share) * (1 - slips), lambda rng: 0.0 if rng.random() < share else 1.0 - slips


CHANCES = {
    "hard": beta_chances(0.05, 0.5),
    "easy": beta_chances(0.5, 0.05),
    "all or nothing": beta_chances(0.3, 0.3),
    "alike": beta_chances(20, 20),
    "nearly all right": beta_chances(50, 2),
    "broken problems": chances_with_unsolvable(0.05, 0.005),
    "fewer": chances_with_unsolvable(0.03, 0.003),
    "and slips": chances_with_unsolvable(0.05, 0.02),
}


@pytest.mark.parametrize("kind", CHANCES)
def test_interval_of_avg_at_n_covers_the_truth(kind):
    """Thirty problems (as in AIME) with eight samples each. If few of them differ, their spread alone is too small."""
    truth, chance = CHANCES[kind]
    rng, hits, trials = random.Random(0), 0, 1000
    for _ in range(trials):
        chances = [chance(rng) for _ in range(30)]
        low, high = accuracy_interval([[float(rng.random() < c) for _ in range(8)] for c in chances])
        hits += low <= truth <= high
    assert hits / trials > 0.93


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(k):
    rows = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0, 0]]
    shares = []
    for row in rows:
        subsets = list(itertools.combinations(row, k))
        shares.append(sum(any(s) for s in subsets) / len(subsets))
    assert compute_pass_at_k([[float(x) for x in row] for row in rows], k) == pytest.approx(sum(shares) / 4, abs=1e-12)


def test_pass_at_k_leaves_out_problems_with_fewer_samples():
    assert compute_pass_at_k([[1.0], [0.0, 0.0]], 2) == 0.0
    assert compute_pass_at_k([[1.0]], 2) == 0.0
    assert compute_pass_at_k([[1.0], [0.0, 1.0]], 1) == 0.75


def test_accuracy_counts_every_problem_once():
    assert compute_accuracy([[1.0, 0.0], [1.0], [], [0.0, 0.0, 0.0]]) == pytest.approx((0.5 + 1 + 0) / 3, abs=1e-12)
    assert compute_accuracy([]) == 0.0


def test_all_passes_go_up_to_the_number_of_samples():
    rows = [[1.0, 0.0, 0.0, 0.0, 0.0]] * 3 + [[1.0] * 5]
    assert [(p.k, round(p.value, 12)) for p in compute_all_pass_at_k(rows)] == [(2, 0.55), (4, 0.85)]
    assert all(p.low <= p.value <= p.high for p in compute_all_pass_at_k(rows)) and not compute_all_pass_at_k([[1.0]])


def test_bootstrap_covers_the_truth_about_95_times_in_100():
    rng, hits, trials = random.Random(1), 0, 150
    for _ in range(trials):
        low, high = bootstrap_interval([rng.random() ** 2 for _ in range(40)])  # of mean 1/3
        hits += low <= 1 / 3 <= high
    assert 0.88 < hits / trials < 0.99
    assert bootstrap_interval([0.5]) == (0.5, 0.5) and bootstrap_interval([]) == (0.0, 1.0)
    # Another statistic than the mean is computed for a single value too.
    assert bootstrap_interval([3.0], lambda values: 2 * sum(values)) == (6.0, 6.0)
    assert bootstrap_interval([0.0, 1.0, 1.0]) == bootstrap_interval([0.0, 1.0, 1.0])


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (5, 1), (3, 3), (9, 0), (20, 8)])
def test_mcnemar_is_the_share_of_coins_as_uneven(wins, losses):
    first = [[0.0]] * wins + [[1.0]] * losses + [[1.0], [0.0]]
    second = [[1.0]] * wins + [[0.0]] * losses + [[1.0], [0.0]]
    found = compare_paired(first, second)
    n, far = wins + losses, abs(wins - losses)
    exact = sum(math.comb(n, k) for k in range(n + 1) if abs(2 * k - n) >= far) / 2**n
    assert (found.wins, found.losses, found.test) == (wins, losses, "exact McNemar")
    assert found.p == pytest.approx(exact, abs=1e-12)
    assert found.mean == pytest.approx((wins - losses) / len(first), abs=1e-12)


def test_many_differences_are_counted_by_the_normal_law():
    first, second = [[0.0]] * 1100 + [[1.0]] * 1000, [[1.0]] * 1100 + [[0.0]] * 1000
    exact = 2 * sum(math.comb(2100, k) for k in range(1001)) / 2**2100
    assert compare_paired(first, second).p == pytest.approx(exact, rel=0.02)


def test_several_samples_are_compared_by_sign_flips():
    first = [[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    second = [[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]
    gains = [0.5, 0.5, -0.5, 1.0]
    sums = [
        abs(sum(s * g for s, g in zip(signs, gains, strict=True))) for signs in itertools.product((-1, 1), repeat=4)
    ]
    exact = sum(x >= abs(sum(gains)) - 1e-12 for x in sums) / 16
    found = compare_paired(first, second)
    assert found.test == "sign flips" and found.p == pytest.approx(exact, abs=0.02)
    spread = math.sqrt(sum((g - 0.375) ** 2 for g in gains) / 3 / 4)
    assert (found.mean, found.high) == pytest.approx((0.375, 0.375 + 1.959963984540054 * spread), abs=1e-12)


def test_a_p_value_is_below_5_percent_about_5_times_in_100_without_a_difference():
    rng, few = random.Random(0), 0
    for _ in range(400):
        rows = [[[float(rng.random() < 0.5)] for _ in range(60)] for _ in range(2)]
        few += compare_paired(*rows).p < 0.05
    assert few / 400 < 0.06
