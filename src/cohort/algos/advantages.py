"""Advantages: how much better than expected a sample did. Plain float64 numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cohort.config.algos import Baseline, Scale

STD_FLOOR = 1e-4
"""Added to a divisor: rewards that differ by rounding must not become full-size advantages."""


def is_constant(rewards: Sequence[float]) -> bool:
    """Whether a group carries no signal. By comparison: a computed std of equal floats can be 1e-17, not 0.

    >>> is_constant([0.1, 0.1, 0.1]), is_constant([]), is_constant([0.0, 1.0])
    (True, True, False)
    """
    return not rewards or max(rewards) == min(rewards)


def mean_of(rewards: Sequence[float]) -> float:
    """fsum: independent of the order of the samples."""
    return math.fsum(rewards) / len(rewards)


def std_of(rewards: Sequence[float]) -> float:
    """Sample standard deviation (n - 1); 0 of fewer than two.

    >>> std_of([1.0, 3.0]) == 2.0**0.5, std_of([5.0])
    (True, 0.0)
    """
    if len(rewards) < 2:
        return 0.0
    mean = mean_of(rewards)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))


def advantages(
    groups: Sequence[Sequence[float]], scale: Scale = "std", baseline: Baseline = "mean"
) -> list[list[float]]:
    """Of the rewards of a step's groups: minus the baseline, over the scale.

    Relative to its group, a constant one (a group of one included) gives exactly zeros.

    >>> advantages([[1.0, 0.0, 0.0, 1.0]], "none")
    [[0.5, -0.5, -0.5, 0.5]]
    >>> [round(a, 4) for a in advantages([[1.0, 0.0, 0.0, 1.0]])[0]]
    [0.8659, -0.8659, -0.8659, 0.8659]
    >>> advantages([[1.0, 0.0, 0.0]], "none", "leave_one_out")
    [[1.0, -0.5, -0.5]]
    >>> advantages([[1.0, 0.0], [0.0, 0.0]], "none", "batch")
    [[0.75, -0.25], [-0.25, -0.25]]
    """
    batch = [reward for rewards in groups for reward in rewards]
    centred = [_centred(rewards, baseline, batch) for rewards in groups]
    if scale == "batch":
        divisors = [std_of(batch)] * len(groups)
    elif scale == "centred":
        divisors = [std_of([c for row in centred for c in row])] * len(groups)
    elif scale == "none":
        return centred
    else:
        # sizes: with rewards of both signs the mean itself may be next to nothing
        divisors = [std_of(r) if scale == "std" else mean_of([abs(x) for x in r]) for r in groups]
    return [[c / (d + STD_FLOOR) if c else c for c in row] for row, d in zip(centred, divisors, strict=True)]


def _centred(rewards: Sequence[float], baseline: Baseline, batch: Sequence[float]) -> list[float]:
    if baseline == "none":
        return list(rewards)
    if baseline == "batch":
        mean = mean_of(batch)
        return [reward - mean for reward in rewards]
    if is_constant(rewards):
        return [0.0] * len(rewards)
    mean, n = mean_of(rewards), len(rewards)
    # the mean of the others lies n / (n - 1) times as far away as the mean of all
    return [(reward - mean) * (n / (n - 1) if baseline == "leave_one_out" else 1.0) for reward in rewards]


def best_of_k(rewards: Sequence[float], k: int) -> list[float]:
    """What each sample adds to the best reward of k samples, summed over the subsets it is in, over their number.

    An unbiased gradient of the expected best of k (arXiv:2505.15201): weighted with these, log-probabilities have it on
    average. A sample that some sibling always beats adds nothing; constant rewards give exactly zeros. Here the subset
    without the sample is its baseline, so k is at least 2.

    >>> best_of_k([1.0, 0.0, 0.0], 2)  # it is in two of three pairs, and makes both better by 1
    [0.6666666666666666, 0.0, 0.0]
    >>> best_of_k([1.0, 1.0, 0.0], 2)
    [0.3333333333333333, 0.3333333333333333, 0.0]
    """
    n, k = len(rewards), min(k, len(rewards))
    if k < 2:
        return [0.0] * n
    order = sorted(range(n), key=lambda i: rewards[i])
    added = [0.0] * n
    for place, i in enumerate(order):
        # it is the best of comb(j, k - 2) subsets in which the j-th is second; of equals nobody adds anything
        gains = ((rewards[i] - rewards[order[j]]) * math.comb(j, k - 2) for j in range(place))
        added[i] = math.fsum(gains) / math.comb(n, k)
    return added
