"""Statistics of scores: how sure an accuracy is, and whether one is better than another.

`scores` are rows, one a problem: the 0 or 1 of each of its samples. Problems are what is drawn independently, so every
interval is over problems, never over samples.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Scores = Sequence[Sequence[float]]

Z = 1.959963984540054  # 97.5% quantile of the normal distribution
RESAMPLES = 2000
FLIPS = 10_000
EXACT = 1000  # problems that differ, up to which a sign test is summed exactly


def accuracy(scores: Scores) -> float:
    """avg@n: the mean over problems of the mean over their samples. A problem without scores is left out."""
    return mean([mean(row) for row in scores if row])


def interval(scores: Scores) -> tuple[float, float]:
    """95% interval of the accuracy: Wilson's, for as many independent answers as those given are worth.

    Samples of one problem are not independent: they are worth as many answers as would spread as far as the problems'
    means do. One problem more, half right and half wrong, goes into that spread: few problems that agree prove little.
    One sample of each problem is worth one answer, exactly.

    >>> [round(x, 3) for x in interval([[1.0]] * 8 + [[0.0]] * 2)]
    [0.49, 0.943]
    >>> [round(x, 3) for x in interval([[1.0, 1.0]] * 8 + [[0.0, 0.0]] * 2)]  # twice the same is worth no more
    [0.49, 0.943]
    """
    means = [mean(row) for row in scores if row]
    n = len(means)
    if not n:
        return 0.0, 1.0
    centre = (math.fsum(means) + 0.5) / (n + 1)
    squares = math.fsum((m - centre) ** 2 for m in means) + 0.5 * centre**2 + 0.5 * (1 - centre) ** 2
    worth = min(centre * (1 - centre) * n * (n + 1) / squares, sum(map(len, scores)))
    return _wilson(mean(means), worth)


def _wilson(p: float, n: float) -> tuple[float, float]:
    centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(scores: Scores, k: int) -> float:
    """Unbiased probability that one of k samples is right (Chen et al. 2021), mean over problems.

    >>> pass_at_k([[1, 0, 0, 0], [0, 0, 0, 0]], 2)
    0.25
    """
    return mean(_passes(scores, k))


@dataclass(frozen=True, kw_only=True, slots=True)
class PassAtK:
    """pass@k with its 95% interval."""

    k: int
    value: float
    low: float
    high: float


def all_passes(scores: Scores) -> list[PassAtK]:
    """pass@k for k = 2, 4, 8, ... up to the number of samples; intervals by bootstrap over problems."""
    most = max(map(len, scores), default=0)
    found = []
    for k in (2**i for i in range(1, 20)):
        if k > most:
            break
        values = _passes(scores, k)
        low, high = bootstrap(values) if min(values) < max(values) else interval([[v] for v in values])
        found.append(PassAtK(k=k, value=mean(values), low=low, high=high))
    return found


def _passes(scores: Scores, k: int) -> list[float]:
    """Of each problem with at least k samples."""

    def missed(row: Sequence[float]) -> float:
        wrong = sum(score == 0.0 for score in row)
        return math.comb(wrong, k) / math.comb(len(row), k)

    return [1.0 - missed(row) for row in scores if len(row) >= k]


def bootstrap(values: Sequence[float], of: Callable[[Sequence[float]], float] | None = None) -> tuple[float, float]:
    """95% percentile interval of the mean (or `of`) of independent values; the same every time."""
    of = of or mean
    if len(values) < 2:
        return (0.0, 1.0) if not values else (values[0], values[0])
    rng = random.Random(0)
    found = sorted(of(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = int(0.025 * RESAMPLES)
    return found[tail], found[-1 - tail]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What the second of two evaluations of the same problems has over the first."""

    mean: float
    low: float  # of a 95% interval
    high: float
    p: float  # probability of a difference at least so large if there were none
    test: str  # how p was found
    wins: int  # problems on which the second is better
    losses: int

    @property
    def verdict(self) -> int:
        """1 or -1 where interval and test agree that the second is better or worse, otherwise 0."""
        sure = self.p < 0.05
        return int(sure and self.low > 0) - int(sure and self.high < 0)


def paired(first: Scores, second: Scores) -> Difference:
    """Problem by problem. Problems that one side has no score for are left out by the caller.

    >>> found = paired([[0.0]] * 9 + [[1.0]], [[1.0]] * 5 + [[0.0]] * 5)
    >>> found.wins, found.losses, round(found.p, 3)
    (5, 1, 0.219)
    """
    gains = [mean(b) - mean(a) for a, b in zip(first, second, strict=True)]
    moved = [g for g in gains if g]
    wins = sum(g > 0 for g in moved)
    single = all(abs(g) == 1 for g in moved)
    p, test = (_sign_test(wins, len(moved)), "exact McNemar") if single else (_flip_test(moved), "sign flips")
    value = mean(gains)
    spread = math.sqrt(math.fsum((g - value) ** 2 for g in gains) / max(1, len(gains) - 1) / max(1, len(gains)))
    return Difference(
        mean=value,
        low=max(-1.0, value - Z * spread),
        high=min(1.0, value + Z * spread),
        p=p,
        test=test,
        wins=wins,
        losses=len(moved) - wins,
    )


def _sign_test(wins: int, n: int) -> float:
    """Two-sided: how likely so uneven a split of n fair coins is."""
    if n > EXACT:
        z = (abs(2 * wins - n) - 1) / math.sqrt(n)  # with the correction for whole numbers
        return math.erfc(max(0.0, z) / math.sqrt(2))
    few = min(wins, n - wins)
    tail = sum(math.comb(n, i) for i in range(few + 1))
    return min(1.0, float(2 * tail / 2**n))


def _flip_test(gains: Sequence[float]) -> float:
    """Two-sided: how often the sum of gains is as large when every sign is a fair coin's; the same every time."""
    seen = abs(math.fsum(gains)) - 1e-12
    rng, as_large = random.Random(0), 0
    for _ in range(FLIPS):
        bits = rng.getrandbits(max(1, len(gains)))
        total = sum(g if bits >> i & 1 else -g for i, g in enumerate(gains))
        as_large += abs(total) >= seen
    return (as_large + 1) / (FLIPS + 1)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
