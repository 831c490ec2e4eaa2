"""Student's t distribution: its tails and its quantiles."""

from __future__ import annotations

import math


def find_t_quantile(freedom: float, outside: float = 0.05) -> float:
    """Returns the number t for which the share `outside` of Student's distribution does not lie between -t and t.

    >>> [round(find_t_quantile(n), 3) for n in (1, 2, 10, math.inf)]
    [12.706, 4.303, 2.228, 1.96]
    """
    low, high = 0.0, 1e9
    # Halving a range of 1e9 so often leaves less than rounding.
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_t_tails(middle, freedom) > outside else (low, middle)
    return high


def compute_t_tails(t: float, freedom: float) -> float:
    """Returns the probability that a number of Student's distribution is at least `t` away from 0, for t >= 0.

    >>> round(compute_t_tails(1.0, 1), 6), round(compute_t_tails(2.0, 2), 6), round(compute_t_tails(1.96, math.inf), 4)
    (0.5, 0.183503, 0.05)
    """
    if freedom > 1e7:
        return math.erfc(t / math.sqrt(2))
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Returns the regularised incomplete beta function I_x(a, b), by its continued fraction."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    # The fraction converges fast only on this side.
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # Lentz's method: `c` and `d` are the ratios of successive numerators and denominators.
    c = 1.0
    d = 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + even * d)
        c = 1 + even / c
        fraction *= c * d
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + odd * d)
        c = 1 + odd / c
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(log_front) * fraction / a
