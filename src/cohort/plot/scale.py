"""Scales of axes: where a value lies between the ends of an axis, and ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LARGEST = 1e100  # beyond it, differences of values could become infinite
_NEAR_ZERO = 0.35  # an axis begins at 0 if its lowest value is below this share of its highest
_PAD = 0.04  # share of the range that stays empty at each end
_UNITS = ((1e9, "G"), (1e6, "M"), (1e4, "k"))  # from which absolute value on a unit is used, with its letter
_FACTORS = {"G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The scale of an axis, linear or logarithmic, with its ticks from the lower end to the upper one."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    def place(self, value: float) -> float:
        """Returns where a value lies: 0 = at the lower end, 1 = at the upper one. A log scale needs a value above 0."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return (value - low) / (high - low)


def is_drawable(value: float, log: bool = False) -> bool:
    """Returns whether a value can be drawn: it is finite, not beyond 1e100 and, on a log scale, above 0."""
    return abs(value) < _LARGEST and (not log or value > 1 / _LARGEST)


def make_linear_scale(values: Sequence[float], most: int = 6, *, pad: bool = True, whole: bool = False) -> Scale:
    """Returns a scale that holds all values, which are drawable, with about `most` ticks at most.

    `pad` leaves a little room at both ends. `whole` allows only whole numbers as ticks. Without values it is (0, 1).
    """
    lowest, highest = min(values, default=0.0), max(values, default=1.0)
    low, high = _widen(lowest, highest)
    # Values whose lowest is near 0, for their size, are read best from 0 on.
    low = 0.0 if pad and 0 <= lowest < _NEAR_ZERO * highest else low
    high = 0.0 if pad and 0 >= highest > _NEAR_ZERO * lowest else high
    room = _PAD * (high - low) if pad else 0.0
    low, high = low - room, high + room
    step = find_tick_step(high - low, most)
    step = max(1.0, step) if whole else step
    ticks = list_multiples(low, high, step)
    return Scale(low=low, high=high, is_log=False, ticks=tuple(ticks), labels=tuple(format_ticks(ticks, step)))


def make_log_scale(values: Sequence[float], most: int = 6) -> Scale:
    """Returns a logarithmic scale that holds all values, which are drawable and above 0, with at most `most` ticks.

    Ticks are powers of ten; in a short range also 2 and 5 times those; in a very short one as on a linear scale.
    """
    low, high = math.log10(min(values, default=1.0)), math.log10(max(values, default=10.0))
    room = max(_PAD * (high - low), 0.02)
    low, high = 10 ** (low - room), 10 ** (high + room)
    exponents = range(math.ceil(math.log10(low)) - 1, math.floor(math.log10(high)) + 1)
    fine = [factor * 10.0**e for e in exponents for factor in (1, 2, 5)]
    ticks = [tick for tick in fine if low <= tick <= high]
    if len(ticks) > most:
        tens = [10.0**e for e in exponents if low <= 10.0**e <= high]
        ticks = tens[:: -(-len(tens) // most)]
    if len(ticks) >= 2:
        labels = [format_value(tick) for tick in ticks]
    else:
        step = find_tick_step(high - low, most - 1)
        ticks = list_multiples(low, high, step)
        labels = format_ticks(ticks, step)
    return Scale(low=low, high=high, is_log=True, ticks=tuple(ticks), labels=tuple(labels))


def _widen(low: float, high: float) -> tuple[float, float]:
    """Returns the range, which becomes wider if it is empty or so narrow that its numbers could not be told apart."""
    size = max(abs(low), abs(high))
    if high - low > 1e-9 * size and high - low > 1 / _LARGEST:
        return low, high
    # Values that are all 0, or below any number that matters.
    if size < 1 / _LARGEST:
        return 0.0, 1.0
    return low - 0.5 * size, high + 0.5 * size


def find_tick_step(span: float, most: int) -> float:
    """Returns the smallest of 1, 2 and 5 times a power of ten that divides `span` into at most `most` parts.

    >>> find_tick_step(1.0, 5), find_tick_step(30, 5), find_tick_step(0.07, 4)
    (0.2, 10.0, 0.02)
    """
    least = span / most
    power = 10.0 ** math.floor(math.log10(least))
    # A hair more, because 0.2 * 5 may be a bit below 1.
    return next(f * power for f in (1, 2, 5, 10) if f * power >= least * (1 - 1e-9))


def list_multiples(low: float, high: float, step: float) -> list[float]:
    """Returns the multiples of `step` from `low` to `high`, both included.

    >>> list_multiples(-0.1, 0.31, 0.1)
    [-0.1, 0.0, 0.1, 0.2, 0.3]
    """
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = 1 - math.floor(math.log10(step))
    # 3 * 0.1 is not 0.3, hence the rounding.
    return [round(n * step, digits) + 0.0 for n in range(first, last + 1)]


def format_ticks(ticks: Sequence[float], step: float) -> list[str]:
    """Returns the labels of ticks that lie `step` apart: all with as many decimals as are needed to tell them apart.

    Large numbers have a unit (k, M, G), tiny ones an exponent, the same one for all.

    >>> format_ticks([0.0, 0.25, 0.5], 0.25), format_ticks([0, 10000, 20000], 10000), format_ticks([1e-6, 2e-6], 1e-6)
    (['0', '0.25', '0.50'], ['0', '10k', '20k'], ['1e-6', '2e-6'])
    """
    size = max((abs(tick) for tick in ticks), default=0.0)
    unit = next((letter for least, letter in _UNITS if size >= least), "")
    factor = _FACTORS[unit]
    if 0 < size < 1e-3 or size >= 1e13:
        exponent = math.floor(math.log10(step) + 1e-9)
        # That of the step gives whole numbers, which are short for few ticks from 0 on.
        if size >= 20 * 10.0**exponent:
            exponent = math.floor(math.log10(size) + 1e-9)
        unit, factor = f"e{exponent}", 10.0**exponent
    decimals = _count_decimals(step / factor)
    # Many decimals of a unit say less than the number itself.
    if decimals > 3 and unit in ("k", "M", "G"):
        unit, factor, decimals = "", 1.0, _count_decimals(step)
    return [f"{tick / factor:.{decimals}f}{unit}" if tick else "0" for tick in ticks]


def _count_decimals(step: float) -> int:
    """Returns how many decimals multiples of `step` need, whose first digits are 1, 2, 5 or 25."""
    text = f"{step:.1e}"
    mantissa, _, exponent = text.partition("e")
    return max(0, -int(exponent) + (0 if mantissa.endswith(".0") else 1))


def format_share(value: float) -> str:
    """Returns a share, such as an accuracy, as all commands print it.

    >>> format_share(3.5e-18), format_share(0.9)
    ('0.000', '0.900')
    """
    return f"{value:.3f}"


def format_value(value: float) -> str:
    """Returns a number in few characters, with at most three significant digits.

    >>> [format_value(v) for v in (0.05, 1.0, 2610.4, 20000.0, 1e-05, 2.5e6, 0.0, 1e20)]
    ['0.05', '1', '2610', '20k', '1e-5', '2.5M', '0', '1e20']
    """
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    unit = next((letter for least, letter in _UNITS if size >= least), "") if size < 1e12 else ""
    if 1000 <= size < 10_000:
        return f"{value:.0f}"
    text = f"{value / _FACTORS[unit]:.3g}"
    mantissa, has_exponent, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if has_exponent else f"{text}{unit}"
