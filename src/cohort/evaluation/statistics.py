"""Statistics of scores: the interval of an accuracy or mean, and whether one evaluation is better than another.

`scores` has one row per problem, with the score of each of its samples: 0 or 1, or any number where it is a reward.
Problems are independent of each other, samples of one problem are not. So every interval is over problems, never over
samples.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cohort.evaluation.student import find_t_quantile

Scores = Sequence[Sequence[float]]

# 97.5% quantile of the normal distribution: 95% lie between -Z and Z.
Z = 1.959963984540054
# A mean over fewer problems has no interval: Student's would be wider than all that the scores can be.
MIN_PROBLEMS = 5
# Draws of a bootstrap.
NUM_RESAMPLES = 2000
# Draws of a sign-flip test.
NUM_SIGN_FLIPS = 10_000
# Up to so many problems that differ, a sign test is summed exactly; above, by the normal approximation.
MAX_EXACT_PROBLEMS = 1000


def compute_accuracy(scores: Scores) -> float:
    """Returns avg@n, the accuracy or mean reward: the mean over problems of the mean score of their samples.

    `scores` has one list per problem, with a score per sample. A problem without scores is left out. 0 if
    there are no scores.
    """
    return mean([mean(row) for row in scores if row])


def accuracy_interval(scores: Scores) -> tuple[float, float]:
    """Returns the 95% interval (low, high) of the accuracy: Wilson's interval with an effective number of answers.

    `scores` has one list per problem, with a score (0 or 1) per sample. Samples of one problem are not independent. The
    effective number is the number of independent answers whose mean would vary as much as the means of the problems do,
    at most the number of scores. One more problem, half right and half wrong, is added to this variance, because few
    problems that agree prove little. With one sample per problem, each counts as one answer. (0, 1) if there are no
    scores.

    >>> [round(x, 3) for x in accuracy_interval([[1.0]] * 8 + [[0.0]] * 2)]
    [0.49, 0.943]
    >>> [round(x, 3) for x in accuracy_interval([[1.0, 1.0]] * 8 + [[0.0, 0.0]] * 2)]
    [0.49, 0.943]
    """
    means = [mean(row) for row in scores if row]
    n = len(means)
    if not n:
        return 0.0, 1.0
    centre = (math.fsum(means) + 0.5) / (n + 1)
    squares = math.fsum((m - centre) ** 2 for m in means) + 0.5 * centre**2 + 0.5 * (1 - centre) ** 2
    num_effective = min(centre * (1 - centre) * n * (n + 1) / squares, sum(map(len, scores)))
    return _wilson_interval(mean(means), num_effective)


def mean_interval(scores: Scores) -> tuple[float, float] | None:
    """Returns the 95% interval (low, high) of the mean over problems of scores that may be any numbers.

    It is Student's over the means of the problems, so it is wide for few problems. None if fewer than MIN_PROBLEMS have
    scores: they hardly tell how much problems differ, and two of 0 and 1 would have an interval from -5.9 to 6.9.

    >>> [round(x, 3) for x in mean_interval([[0.5], [0.6], [0.7], [0.8], [0.9]])]
    [0.504, 0.896]
    """
    means = [mean(row) for row in scores if row]
    n = len(means)
    if n < MIN_PROBLEMS:
        return None
    centre = mean(means)
    variance = math.fsum((m - centre) ** 2 for m in means) / (n - 1) / n
    half = find_t_quantile(n - 1) * math.sqrt(variance)
    return centre - half, centre + half


def _wilson_interval(p: float, n: float) -> tuple[float, float]:
    """Returns Wilson's 95% interval (low, high) of a share `p` of right answers among `n` independent ones.

    `n` need not be whole.
    """
    centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def compute_pass_at_k(scores: Scores, k: int) -> float:
    """Returns pass@k: the probability that at least one of k samples of a problem is right, mean over problems.

    It is estimated without bias (Chen et al. 2021). Problems with fewer than k samples are left out; 0 if none is left.
    A sample is right unless its score is 0.

    >>> compute_pass_at_k([[1, 0, 0, 0], [0, 0, 0, 0]], 2)
    0.25
    """
    return mean(_pass_at_k_per_problem(scores, k))


@dataclass(frozen=True, kw_only=True, slots=True)
class PassAtK:
    """pass@k with its 95% interval."""

    k: int
    value: float
    low: float
    high: float


def compute_all_pass_at_k(scores: Scores) -> list[PassAtK]:
    """Returns pass@k with its 95% interval for k = 2, 4, 8, ... up to the largest number of samples of a problem.

    Problems with fewer than k samples are left out. Intervals are by bootstrap over problems, or Wilson's if all
    problems have the same value. [] if no problem has two samples.
    """
    most = max(map(len, scores), default=0)
    results = []
    for k in (2**i for i in range(1, 20)):
        if k > most:
            break
        values = _pass_at_k_per_problem(scores, k)
        # A bootstrap of equal values would give an interval of width 0.
        low, high = (
            bootstrap_interval(values) if min(values) < max(values) else accuracy_interval([[v] for v in values])
        )
        results.append(PassAtK(k=k, value=mean(values), low=low, high=high))
    return results


def _pass_at_k_per_problem(scores: Scores, k: int) -> list[float]:
    """Returns pass@k of each problem that has at least k samples, in the order of the problems.

    That is the probability that at least one of k samples is right.
    """

    def compute_miss_probability(row: Sequence[float]) -> float:
        """Returns the probability that k samples of `row`, drawn without repetition, all have the score 0."""
        wrong = sum(score == 0.0 for score in row)
        return math.comb(wrong, k) / math.comb(len(row), k)

    return [1.0 - compute_miss_probability(row) for row in scores if len(row) >= k]


def bootstrap_interval(
    values: Sequence[float], statistic: Callable[[Sequence[float]], float] | None = None
) -> tuple[float, float]:
    """Returns the 95% interval (low, high) of the mean of independent values, by bootstrap (resampling).

    `statistic` is computed in place of the mean if it is given. The random numbers have a fixed seed, so equal values
    give equal intervals. (0, 1) if there are no values. A single value gives an interval of width 0.
    """
    statistic = statistic or mean
    if not values:
        return 0.0, 1.0
    rng = random.Random(0)
    results = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    tail = int(0.025 * NUM_RESAMPLES)
    return results[tail], results[-1 - tail]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How much better the second of two evaluations of the same problems is than the first."""

    mean: float  # of the differences in accuracy, or in mean reward, per problem
    low: float  # of the 95% interval of the mean
    high: float
    p: float  # probability of a difference at least this large if both were equally good
    test: str  # the name of the test that computed p
    wins: int  # problems on which the second is better
    losses: int

    @property
    def verdict(self) -> int:
        """1 if interval and test (p < 0.05) both say that the second evaluation is better, -1 if both say worse.

        0 otherwise.
        """
        is_significant = self.p < 0.05
        return int(is_significant and self.low > 0) - int(is_significant and self.high < 0)


def compare_paired(first: Scores, second: Scores, are_shares: bool = True) -> Difference:
    """Returns how much better `second` is than `first`: mean difference, its 95% interval, test, wins and losses.

    Both have one list of scores per problem, in the same order, none of them empty. p is from an exact McNemar test if
    every problem that differs does so by 1, as with one sample per problem, else from a sign-flip test. The interval is
    by normal approximation. `are_shares` = the scores are 0 or 1. Otherwise they are rewards: the test is always that
    of sign flips, and the interval may go beyond -1 and 1.

    >>> result = compare_paired([[0.0]] * 9 + [[1.0]], [[1.0]] * 5 + [[0.0]] * 5)
    >>> result.wins, result.losses, round(result.p, 3)
    (5, 1, 0.219)
    """
    gains = [mean(b) - mean(a) for a, b in zip(first, second, strict=True)]
    moved = [g for g in gains if g]
    wins = sum(g > 0 for g in moved)
    # With one sample per problem a difference is +1 or -1, and the exact test applies.
    single = are_shares and all(abs(g) == 1 for g in moved)
    p, test = (_sign_test(wins, len(moved)), "exact McNemar") if single else (_sign_flip_test(moved), "sign flips")
    value = mean(gains)
    spread = math.sqrt(math.fsum((g - value) ** 2 for g in gains) / max(1, len(gains) - 1) / max(1, len(gains)))
    limit = 1.0 if are_shares else math.inf
    return Difference(
        mean=value,
        low=max(-limit, value - Z * spread),
        high=min(limit, value + Z * spread),
        p=p,
        test=test,
        wins=wins,
        losses=len(moved) - wins,
    )


def _sign_test(wins: int, n: int) -> float:
    """Returns the p-value of a two-sided sign test: `wins` of `n` differing problems against a fair coin.

    It is exact up to MAX_EXACT_PROBLEMS problems, and approximated by the normal distribution above. 1 if `n` is 0.
    """
    if n > MAX_EXACT_PROBLEMS:
        # The 1 is the continuity correction of the normal approximation.
        z = (abs(2 * wins - n) - 1) / math.sqrt(n)
        return math.erfc(max(0.0, z) / math.sqrt(2))
    few = min(wins, n - wins)
    tail = sum(math.comb(n, i) for i in range(few + 1))
    return min(1.0, float(2 * tail / 2**n))


def _sign_flip_test(gains: Sequence[float]) -> float:
    """Returns the p-value of a two-sided sign-flip test of the differences `gains` between pairs.

    It is the share of draws with random signs whose sum is at least as large, in absolute value, as the sum of `gains`.
    There are NUM_SIGN_FLIPS draws with a fixed seed, so equal gains give equal results. The observed signs count as one
    more draw, so the p-value is never 0.
    """
    # Less a little, so that rounding does not hide equal sums.
    observed = abs(math.fsum(gains)) - 1e-12 * max(1.0, math.fsum(map(abs, gains)))
    rng = random.Random(0)
    as_large = 0
    for _ in range(NUM_SIGN_FLIPS):
        bits = rng.getrandbits(max(1, len(gains)))
        total = sum(g if bits >> i & 1 else -g for i, g in enumerate(gains))
        as_large += abs(total) >= observed
    # The observed signs are one of the possible draws, so p is never 0.
    return (as_large + 1) / (NUM_SIGN_FLIPS + 1)


def mean(values: Sequence[float]) -> float:
    """Returns the mean; 0 if there are no values."""
    return math.fsum(values) / len(values) if values else 0.0
