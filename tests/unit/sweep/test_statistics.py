"""Statistics over problems and seeds, compared with numbers worked out by hand and with printed tables."""

from __future__ import annotations

import math
import random

import pytest

from cohort.evaluation.statistics import accuracy_interval
from cohort.sweep.statistics import (
    adjust_p_value,
    compute_p_value,
    compute_t_tails,
    estimate_difference,
    estimate_mean,
    estimate_scatter,
    find_accuracy_interval,
    find_interval,
    find_t_quantile,
)

# Means of the seeds 2/3 and 0, of the problems 1/2, 1/2 and 0, of all 1/3.
TABLE = [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_the_variance_has_a_part_of_the_seeds_and_one_of_the_problems() -> None:
    # Problems: (1/36 + 1/36 + 4/36) / 2 / 3 = 1/36. Seeds: 2 (1/9) / 1 / 2 = 1/9. What is left of each number:
    # 1/6, 1/6, -1/3 and their negatives, squares 1/3, over 2 degrees of freedom and 6 numbers: 1/36.
    found = estimate_mean(TABLE)
    assert found.mean == pytest.approx(1 / 3)
    assert found.variance == pytest.approx(1 / 36 + 1 / 9 - 1 / 36)
    # (1/9)^2 / ((1/36)^2 / 2 + (1/9)^2 / 1 + (1/36)^2 / 2) = 16 / 17
    assert found.freedom == pytest.approx(16 / 17)


def test_one_seed_is_over_problems_alone() -> None:
    found = estimate_mean([[1.0, 0.0, 0.0, 1.0]])
    assert (found.mean, found.variance, found.freedom) == (0.5, pytest.approx(1.0 / 3 / 4), 3)


def test_equal_seeds_add_nothing_to_the_variance_of_problems() -> None:
    twice = estimate_mean([[1.0, 0.0, 0.0, 1.0]] * 2)
    assert twice.variance == pytest.approx(1.0 / 3 / 4) and twice.freedom == pytest.approx(3)


def test_the_variance_is_never_less_than_that_of_problems() -> None:
    # The seeds have equal means, but differ on each problem: seeds 0, rest above 0.
    found = estimate_mean([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert found.variance == pytest.approx((1 / 36 + 1 / 36 + 4 / 36) / 2 / 3)


def test_the_scatter_of_seeds_is_that_of_all_combinations_by_hand() -> None:
    # Seeds move three combinations apart: 0.1, 0, -0.1 from their means, and back. Squares 0.04 over 1 x 2.
    found = estimate_scatter([[0.5, 0.6, 0.7], [0.7, 0.6, 0.5]])
    assert found is not None and (found.shared, found.own) == pytest.approx((0.0, 0.02), abs=1e-12)
    (part,) = found.difference_parts
    assert (part.variance, part.freedom) == (pytest.approx(2 * 0.02 / 2), 2)
    # A mean has the sixth part of two thirds of it, and nothing that all share.
    assert [p.variance for p in found.mean_parts] == pytest.approx([0.0, 0.02 * 2 / 6], abs=1e-12)
    # Seeds move both combinations alike, by 0.1 from their means: the variance of a mean of two is 0.02 / 2.
    alike = estimate_scatter([[0.4, 0.5], [0.6, 0.7]])
    assert alike is not None and [p.variance for p in alike.mean_parts] == pytest.approx([0.01, 0.0], abs=1e-12)
    assert alike.difference_parts[0].variance == pytest.approx(0.0, abs=1e-12)
    assert estimate_scatter([[0.5, 0.6]]) is None and estimate_scatter([[0.5], [0.6]]) is None


def test_with_two_combinations_the_scatter_is_that_of_their_difference() -> None:
    first, second = [[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]], [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    table = [[b - a for a, b in zip(*rows, strict=True)] for rows in zip(first, second, strict=True)]
    scatter = estimate_scatter([[sum(a) / 3, sum(b) / 3] for a, b in zip(first, second, strict=True)])
    assert scatter is not None
    alone, together = estimate_difference(table), estimate_difference(table, scatter.difference_parts)
    assert together.variance == pytest.approx(alone.variance) and together.freedom == pytest.approx(alone.freedom)


def test_an_interval_is_the_mean_and_t_deviations() -> None:
    low, high = find_interval(estimate_mean([[1.0, 0.0, 0.0, 1.0]]))
    # The table of Student's distribution has 3.182 for 3 degrees of freedom.
    assert (low, high) == pytest.approx((0.5 - 3.182 * math.sqrt(1 / 12), 0.5 + 3.182 * math.sqrt(1 / 12)), abs=1e-3)


def test_the_interval_of_an_accuracy_covers_wilsons() -> None:
    assert find_accuracy_interval([[1.0] * 10], [[1.0]] * 10) == accuracy_interval([[1.0]] * 10)
    # All right for both seeds: the variance is 0, Wilson's interval is not.
    low, high = find_accuracy_interval([[1.0] * 10] * 2, [[1.0, 1.0]] * 10)
    assert (low, high) == accuracy_interval([[1.0, 1.0]] * 10) and low < 0.9
    assert find_accuracy_interval(TABLE, [[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]) == (0.0, 1.0)


def test_quantiles_are_those_of_printed_tables() -> None:
    printed = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}
    assert {n: round(find_t_quantile(n), 3) for n in printed} == printed


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 40.0])
def test_tails_have_closed_forms_for_one_and_two_degrees_of_freedom(t: float) -> None:
    assert compute_t_tails(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), abs=1e-12)
    assert compute_t_tails(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-12)
    assert compute_t_tails(t, 4) == pytest.approx(
        1 - t * (t * t + 6) / (t * t + 4) ** 1.5, abs=1e-12
    )  # the closed form for 4


def test_a_p_value_is_that_of_a_t_test() -> None:
    # Differences 1, 1, 0, 0 of one seed: mean 1/2, variance 1/12, t = sqrt(3) with 3 degrees of freedom.
    t = math.sqrt(3)
    by_hand = 1 - 2 / math.pi * (t / math.sqrt(3) / (1 + t * t / 3) + math.atan(t / math.sqrt(3)))
    assert compute_p_value(estimate_mean([[1.0, 1.0, 0.0, 0.0]])) == pytest.approx(by_hand)
    assert compute_p_value(estimate_mean([[0.0, 0.0]])) == 1.0 and compute_p_value(estimate_mean([[1.0, 1.0]])) == 0.0


def test_a_p_value_and_its_interval_agree_by_hand() -> None:
    # Six of eight problems are lost, none is won. With one added on each side: 7 times -1, twice 0, once 1; mean -0.6,
    # sum of squares 8 - 3.6 = 4.4, variance of the mean 4.4 / 9 / 10.
    found = estimate_difference([[-1.0] * 6 + [0.0] * 2])
    assert (found.mean, found.variance, found.freedom) == (pytest.approx(-0.6), pytest.approx(4.4 / 90), 9)
    # t is 2.714. Printed tables have, for 9 degrees of freedom, 2.262 (5% outside), 2.685 (2.5%) and 2.933 (5% / 3).
    for num, quantile in ((1, 2.262), (2, 2.685), (3, 2.933)):
        low, high = find_interval(found, num)
        assert high == pytest.approx(-0.6 + quantile * math.sqrt(4.4 / 90), abs=2e-4)
        assert low == pytest.approx(-0.6 - quantile * math.sqrt(4.4 / 90), abs=2e-4)
    p = compute_p_value(found)
    assert p == pytest.approx(0.0239, abs=1e-4)
    # Two comparisons: 0.048 and an interval that ends at -0.006. Three: 0.072 and one that ends at +0.049.
    assert adjust_p_value(p, 2) == pytest.approx(0.0478, abs=2e-4) and find_interval(found, 2)[1] < 0
    assert adjust_p_value(p, 3) == pytest.approx(0.0717, abs=2e-4) and find_interval(found, 3)[1] > 0
    assert adjust_p_value(0.4, 3) == 1.0


def test_a_p_value_is_below_5_percent_exactly_where_the_interval_leaves_out_0() -> None:
    rng = random.Random(0)
    seen = set()
    for _ in range(300):
        shift, num = rng.random(), rng.choice((1, 2, 5))
        seeds, problems = rng.choice((1, 2, 4)), rng.choice((1, 3, 10, 40))
        table = [
            [float(rng.random() < shift) - float(rng.random() < 0.5) for _ in range(problems)] for _ in range(seeds)
        ]
        found = estimate_difference(table)
        low, high = find_interval(found, num)
        is_significant = adjust_p_value(compute_p_value(found), num) < 0.05
        assert is_significant == (low > 0 or high < 0), table
        seen.add((seeds, is_significant))
    assert len(seen) == 6


def test_a_few_problems_with_equal_differences_are_not_certain() -> None:
    # Two problems, both won: 1, 1 and the added 1 and -1 have mean 1/2 and variance 3 / 3 / 4. t is 1.
    found = estimate_difference([[1.0, 1.0]])
    assert (found.mean, found.variance) == (0.5, 0.25) and compute_p_value(found) > 0.3
    assert compute_p_value(estimate_difference([[1.0] * 20] * 2)) < 0.001
