"""Statistics over problems and seeds: the interval of a mean, and whether a mean differs from 0.

A table of numbers has one row per seed and one column per problem. Both are drawn from many: another seed trains
another model, and other problems would be as good. So the variance of the mean has a part of the seeds and a part of
the problems (a crossed design with random effects). With S seeds and P problems, and the mean squares of seeds,
problems and the rest in a two-way analysis of variance, it is (MS_seeds + MS_problems - MS_rest) / (S P).

Two or three seeds of one combination say little about how much seeds scatter. So the part of the seeds is estimated
from all combinations together (`SeedStats`), which takes them to scatter alike: a design of blocks, one per seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cohort.evaluation.statistics import Scores, accuracy_interval, mean, mean_interval
from cohort.evaluation.student import compute_t_tails, find_t_quantile

Table = Sequence[Sequence[float]]
"""One row per seed, one column per problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossedStats:
    """A mean over problems and seeds with its variance and the degrees of freedom of that."""

    mean: float
    variance: float
    freedom: float


@dataclass(frozen=True, kw_only=True, slots=True)
class VariancePart:
    """A part of the variance of a mean, with its degrees of freedom."""

    variance: float
    freedom: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedStats:
    """How much seeds scatter, estimated from all combinations that have the same seeds."""

    shared: float  # mean square of the seeds: what a seed does to all combinations alike
    own: float  # mean square of the rest: what a seed does to one combination
    num_combinations: int
    num_seeds: int

    @property
    def mean_parts(self) -> tuple[VariancePart, ...]:
        """What seeds add to the variance of the mean of one combination."""
        num, freedom = self.num_combinations * self.num_seeds, self.num_seeds - 1
        return (
            VariancePart(variance=self.shared / num, freedom=freedom),
            VariancePart(
                variance=self.own * (self.num_combinations - 1) / num, freedom=(self.num_combinations - 1) * freedom
            ),
        )

    @property
    def difference_parts(self) -> tuple[VariancePart, ...]:
        """What seeds add to the variance of the difference of two combinations."""
        freedom = (self.num_combinations - 1) * (self.num_seeds - 1)
        return (VariancePart(variance=2 * self.own / self.num_seeds, freedom=freedom),)


def estimate_scatter(means: Table) -> SeedStats | None:
    """Returns how much seeds scatter. `means` has one row per seed and one column per combination.

    None if there are fewer than two of either: then each table has to tell by itself.
    """
    num_seeds, num = len(means), len(means[0]) if means else 0
    if num_seeds < 2 or num < 2:
        return None
    by_seed, left = _split_effects(means)
    return SeedStats(
        shared=num * _sum_squares(by_seed, mean(by_seed)) / (num_seeds - 1),
        own=_sum_squares(left, 0.0) / ((num_seeds - 1) * (num - 1)),
        num_combinations=num,
        num_seeds=num_seeds,
    )


def _split_effects(table: Table) -> tuple[list[float], list[float]]:
    """Returns the means of the rows, and what is left of each number without the means of its row and column."""
    by_row = [mean(row) for row in table]
    by_column = [mean(column) for column in zip(*table, strict=True)]
    centre = mean(by_row)
    return by_row, [
        value - by_row[r] - by_column[c] + centre for r, row in enumerate(table) for c, value in enumerate(row)
    ]


def estimate_mean(table: Table, seed_parts: Sequence[VariancePart] = ()) -> CrossedStats:
    """Returns the mean of a table with at least two problems, and its variance.

    With one seed the variance is that over problems alone. With several it is never less than that. `seed_parts` is
    what seeds add to it; () = as this table tells. The degrees of freedom are Satterthwaite's: few if the seeds differ
    much, about as many as problems if they do not.
    """
    num_seeds, num_problems = len(table), len(table[0])
    by_seed, left = _split_effects(table)
    by_problem = [mean(column) for column in zip(*table, strict=True)]
    centre = mean(by_seed)
    problems = _sum_squares(by_problem, centre) / (num_problems - 1) / num_problems
    if num_seeds == 1:
        return CrossedStats(mean=centre, variance=problems, freedom=num_problems - 1)
    seeds = _sum_squares(by_seed, centre) / (num_seeds - 1) / num_seeds
    parts = seed_parts or [VariancePart(variance=seeds, freedom=num_seeds - 1)]
    rest_freedom = (num_seeds - 1) * (num_problems - 1)
    rest = _sum_squares(left, 0.0) / rest_freedom / (num_seeds * num_problems)
    variance = max(problems, problems + math.fsum(part.variance for part in parts) - rest)
    spread = problems**2 / (num_problems - 1) + rest**2 / rest_freedom
    spread += math.fsum(part.variance**2 / part.freedom for part in parts)
    return CrossedStats(mean=centre, variance=variance, freedom=variance**2 / spread if spread else math.inf)


def _sum_squares(values: Sequence[float], centre: float) -> float:
    """Returns the sum of the squared distances of values from a centre."""
    return math.fsum((value - centre) ** 2 for value in values)


def estimate_difference(table: Table, seed_parts: Sequence[VariancePart] = ()) -> CrossedStats:
    """Returns the mean of a table of differences between -1 and 1, and its variance, of which seeds add `seed_parts`.

    Two problems are added, one that each side wins (the method of Bonett and Price). Without them a few problems that
    all have the same difference would have no variance and look certain.
    """
    # They bring the means of all seeds nearer to 0 by the same factor.
    factor = (len(table[0]) / (len(table[0]) + 2)) ** 2
    parts = [VariancePart(variance=factor * part.variance, freedom=part.freedom) for part in seed_parts]
    return estimate_mean([[*row, 1.0, -1.0] for row in table], parts)


def find_interval(estimate: CrossedStats, num_comparisons: int = 1) -> tuple[float, float]:
    """Returns the 95% interval of a mean, by Student's distribution.

    With several comparisons it is wider, so that all of their intervals together hold with 95% (Bonferroni's method).
    """
    half = find_t_quantile(estimate.freedom, 0.05 / num_comparisons) * math.sqrt(estimate.variance)
    return estimate.mean - half, estimate.mean + half


def find_accuracy_interval(
    table: Table, scores: Scores, seed_parts: Sequence[VariancePart] = ()
) -> tuple[float, float]:
    """Returns the 95% interval of the mean accuracy over problems and seeds, within 0 and 1.

    `table` has the accuracy of each problem (the mean over its samples) by seed; `scores` has one list per problem,
    with the scores of all its samples of all seeds. The interval covers Wilson's over problems (`accuracy_interval`),
    which is right where all answers are right or all are wrong. With one seed it is Wilson's alone.
    """
    low, high = accuracy_interval(scores)
    if len(table) > 1 and len(table[0]) > 1:
        wide = find_interval(estimate_mean(table, seed_parts))
        low, high = min(low, wide[0]), max(high, wide[1])
    return max(0.0, low), min(1.0, high)


def find_mean_interval(
    table: Table, scores: Scores, seed_parts: Sequence[VariancePart] = ()
) -> tuple[float, float] | None:
    """Returns the 95% interval of a mean reward over problems and seeds; None if there is only one problem.

    The arguments are those of `find_accuracy_interval`, with rewards in place of accuracies.
    """
    if len(table) > 1 and len(table[0]) > 1:
        return find_interval(estimate_mean(table, seed_parts))
    return mean_interval(scores)


def compute_p_value(estimate: CrossedStats) -> float:
    """Returns the probability of a mean at least so far from 0, on either side, if the true one is 0: a t-test."""
    if estimate.variance == 0:
        return 1.0 if estimate.mean == 0 else 0.0
    t = abs(estimate.mean) / math.sqrt(estimate.variance)
    return compute_t_tails(t, estimate.freedom)


def adjust_p_value(p: float, num_comparisons: int) -> float:
    """Returns a p-value that allows for the number of comparisons, by Bonferroni's method.

    It is below 0.05 exactly where `find_interval` with the same number leaves 0 out.

    >>> adjust_p_value(0.02, 3), adjust_p_value(0.5, 3)
    (0.06, 1.0)
    """
    return min(1.0, p * num_comparisons)
