"""Group-relative advantages: how much better than its siblings a sample did. Plain float64 numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

STD_FLOOR = 1e-4
"""Added to the standard deviation: rewards that differ by rounding must not become full-size advantages."""


def is_constant(rewards: Sequence[float]) -> bool:
    """Whether a group carries no signal. By comparison: a computed std of equal floats can be 1e-17, not 0.

    >>> is_constant([0.1, 0.1, 0.1]), is_constant([]), is_constant([0.0, 1.0])
    (True, True, False)
    """
    return not rewards or max(rewards) == min(rewards)


def advantages(rewards: Sequence[float], scale: Literal["std", "none"] = "std") -> list[float]:
    """Rewards minus their mean, over their sample standard deviation (n - 1) if `scale` is "std".

    A constant group, a group of one included, gives exactly zeros.

    >>> advantages([1.0, 0.0, 0.0, 1.0], scale="none")
    [0.5, -0.5, -0.5, 0.5]
    >>> [round(a, 4) for a in advantages([1.0, 0.0, 0.0, 1.0])]
    [0.8659, -0.8659, -0.8659, 0.8659]
    """
    if is_constant(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)  # fsum: independent of the order of the samples
    centred = [reward - mean for reward in rewards]
    if scale == "none":
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + STD_FLOOR) for c in centred]
