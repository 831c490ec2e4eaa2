"""Advantages: how much better than expected each sample did. Plain float64 numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cohort.config.algos import Baseline, Scale

STD_FLOOR = 1e-4
"""Added to every divisor. Without it, rewards that differ only by rounding would give advantages of full size."""


def is_constant(rewards: Sequence[float]) -> bool:
    """Returns whether all rewards of a group are equal, so that the group carries no signal; True if there are none.

    The rewards are compared: the computed standard deviation of equal floats can be 1e-17 instead of 0.

    >>> is_constant([0.1, 0.1, 0.1]), is_constant([]), is_constant([0.0, 1.0])
    (True, True, False)
    """
    return not rewards or max(rewards) == min(rewards)


def mean_of(rewards: Sequence[float]) -> float:
    """Returns the mean of at least one reward. The order of the rewards does not change it, not even by rounding.

    Raises ZeroDivisionError if there is none.
    """
    return math.fsum(rewards) / len(rewards)


def std_of(rewards: Sequence[float]) -> float:
    """Returns the sample standard deviation (divisor n - 1), and 0 for fewer than two rewards.

    >>> std_of([1.0, 3.0]) == 2.0**0.5, std_of([5.0])
    (True, 0.0)
    """
    if len(rewards) < 2:
        return 0.0
    mean = mean_of(rewards)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))


def compute_advantages(
    groups: Sequence[Sequence[float]], scale: Scale = "std", baseline: Baseline = "mean"
) -> list[list[float]]:
    """Returns the advantages (reward - baseline) / (scale + STD_FLOOR) of a step's groups, in the shape of `groups`.

    `groups` has one list of rewards per group. `baseline` and `scale` are explained in `config.algos.Policy`; `scale`
    "none" divides by nothing, "mean" by the mean of absolute rewards. With a baseline of the group ("mean",
    "leave_one_out"), a group of equal rewards or of one sample gets exact zeros.

    >>> compute_advantages([[1.0, 0.0, 0.0, 1.0]], "none")
    [[0.5, -0.5, -0.5, 0.5]]
    >>> [round(a, 4) for a in compute_advantages([[1.0, 0.0, 0.0, 1.0]])[0]]
    [0.8659, -0.8659, -0.8659, 0.8659]
    >>> compute_advantages([[1.0, 0.0, 0.0]], "none", "leave_one_out")
    [[1.0, -0.5, -0.5]]
    >>> compute_advantages([[1.0, 0.0], [0.0, 0.0]], "none", "batch")
    [[0.75, -0.25], [-0.25, -0.25]]
    """
    batch = [reward for rewards in groups for reward in rewards]
    centred = [_subtract_baseline(rewards, baseline, batch) for rewards in groups]
    if scale == "batch":
        divisors = [std_of(batch)] * len(groups)
    elif scale == "centred":
        divisors = [std_of([c for row in centred for c in row])] * len(groups)
    elif scale == "none":
        return centred
    else:
        # The mean is over absolute values: with rewards of both signs the plain mean may be near zero.
        divisors = [std_of(r) if scale == "std" else mean_of([abs(x) for x in r]) for r in groups]
    return [[c / (d + STD_FLOOR) if c else c for c in row] for row, d in zip(centred, divisors, strict=True)]


def _subtract_baseline(rewards: Sequence[float], baseline: Baseline, batch: Sequence[float]) -> list[float]:
    """Returns one group's rewards minus the baseline, as a new list.

    `batch` has the rewards of all groups of the step; only the baseline "batch" uses it. With "mean" and
    "leave_one_out", equal rewards give exact zeros.
    """
    if baseline == "none":
        return list(rewards)
    if baseline == "batch":
        mean = mean_of(batch)
        return [reward - mean for reward in rewards]
    if is_constant(rewards):
        return [0.0] * len(rewards)
    mean, n = mean_of(rewards), len(rewards)
    # The mean of the other samples is n / (n - 1) times as far from a reward as the mean of all samples.
    return [(reward - mean) * (n / (n - 1) if baseline == "leave_one_out" else 1.0) for reward in rewards]


def best_of_k_gains(rewards: Sequence[float], k: int) -> list[float]:
    """Returns, per sample, how much it raises the best reward of k samples, on average over all subsets of size k.

    A subset without the sample counts 0. The sum of gain times log-probability has, on average, the gradient of the
    expected best of k (arXiv:2505.15201). A sample that is the best of no subset gains nothing; constant rewards give
    exact zeros. A sample is compared with the best of the other k - 1, so a k below 2 gives zeros. A k above the number
    of samples is lowered to it.

    >>> best_of_k_gains([1.0, 0.0, 0.0], 2)  # the first is in two of three pairs, and raises both by 1
    [0.6666666666666666, 0.0, 0.0]
    >>> best_of_k_gains([1.0, 1.0, 0.0], 2)
    [0.3333333333333333, 0.3333333333333333, 0.0]
    """
    n, k = len(rewards), min(k, len(rewards))
    if k < 2:
        return [0.0] * n
    order = sorted(range(n), key=lambda i: rewards[i])
    gains = [0.0] * n
    for place, i in enumerate(order):
        # Sample i is the best, and the sample at place j the second best, in comb(j, k - 2) subsets. In each of them
        # sample i adds the difference of both rewards. Samples with equal rewards add nothing.
        weighted = ((rewards[i] - rewards[order[j]]) * math.comb(j, k - 2) for j in range(place))
        gains[i] = math.fsum(weighted) / math.comb(n, k)
    return gains
