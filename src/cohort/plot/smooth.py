"""Smoothing of curves: the mean over the steps around each step, so that a smooth curve does not lag behind."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping

from cohort.plot.scale import is_drawable


def smooth_series(values: Mapping[int, float], window: int, log: bool = False) -> dict[int, float]:
    """Returns the means of `values` (by step) over `window` steps around each step; the step itself is in the middle.

    At both ends the window is cut, so the first and the last means are over about half as many steps. Values that
    cannot be drawn do not count, and steps without any value in their window are left out. With `log` the mean is the
    geometric one, as a log axis shows values.

    >>> smooth_series({1: 0.0, 2: 3.0, 3: 3.0, 4: float("nan")}, 3)
    {1: 1.5, 2: 2.0, 3: 3.0, 4: 3.0}
    """
    steps = sorted(step for step, value in values.items() if is_drawable(value, log))
    numbers = [math.log(values[step]) if log else values[step] for step in steps]
    means = {}
    for step in sorted(values):
        first = bisect_left(steps, step - (window - 1) // 2)
        last = bisect_right(steps, step + window // 2)
        if first < last:
            mean = sum(numbers[first:last]) / (last - first)
            means[step] = math.exp(mean) if log else mean
    return means
