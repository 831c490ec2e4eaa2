"""Numbers and reasons as a report writes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from cohort.fates import Fate
from cohort.inspect.explain.effect import CLIPPED, CORRECTED, NO_ADVANTAGE, NOT_FINITE
from cohort.logs.numbers import compact

WHY = {
    Fate.CONSTANT_REWARD: "all samples of a group were paid the same, so none is better than another",
    "equal rewards": "all samples of a group were paid the same, and algo.dead = drop",
    Fate.NO_GAIN: "no sample of a group makes the best of k better",
    "too few scored samples": "a baseline needs at least two",
    "masked: truncated": "it was cut at max_tokens, and algo.truncated = mask",
    "failed": "the grader broke down, so there is no reward",
    "empty": "it has no sampled token",
    NO_ADVANTAGE: "it did exactly as well as expected",
    CLIPPED: "the ratio has left the clip range on the side the advantage pushes to",
    NOT_FINITE: "its log-probability, ratio or advantage is not a finite number",
    CORRECTED: "the learner and the sampler disagree too much about it",
}


def because(reason: str) -> str:
    """
    >>> because("empty"), because("told so")
    ('empty: it has no sampled token', 'told so')
    """
    return f"{reason}: {WHY[reason]}" if reason in WHY else reason


def number(value: float) -> str:
    """
    >>> number(1.0), number(0.25), number(-2.0)
    ('1', '0.250', '-2')
    """
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e6 else compact(value)


def signed(value: float) -> str:
    """
    >>> signed(0.25), signed(-2.0), signed(0.0)
    ('+0.250', '-2', '0')
    """
    return f"+{number(value)}" if value > 0 else number(value)


def plural(n: int, noun: str) -> str:
    """
    >>> plural(1, "sample"), plural(3, "sample")
    ('1 sample', '3 samples')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers, neighbours joined.

    >>> ranges([1, 2, 3, 7, 9, 10])
    '1-3, 7, 9-10'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def counted(total: int, kinds: Counter[str]) -> str:
    """
    >>> counted(8, Counter({"in the loss": 6, "out: constant reward": 2}))
    '8: 6 in the loss, 2 out: constant reward'
    """
    return f"{total}: " + (", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none in the loss")


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float:
    """Of a sample (n - 1); 0 of fewer than two."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


def mean_std(values: Sequence[float]) -> str:
    """
    >>> mean_std([1.0, 0.0]), mean_std([])
    ('0.500 ± 0.707', 'none')
    """
    return f"{number(mean(values))} ± {number(std(values))}" if values else "none"


def spread(values: Sequence[float]) -> str:
    """
    >>> spread([1.0, 0.0])
    '0.500 ± 0.707, from 0 to 1'
    """
    return f"{mean_std(values)}, from {number(min(values))} to {number(max(values))}"
