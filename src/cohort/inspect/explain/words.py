"""Numbers and reasons as text for a report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from cohort.fates import Fate
from cohort.inspect.explain.effect import CLIPPED, CORRECTED, NO_ADVANTAGE, NOT_FINITE
from cohort.logs.numbers import format_compact

REASONS = {
    Fate.CONSTANT_REWARD: "all samples of a group got the same reward, so none is better than another",
    "equal rewards": "all samples of a group got the same reward, and algo.dead = drop",
    Fate.NO_GAIN: "no sample of a group improves the best of k",
    "too few scored samples": "a baseline or a pair needs at least two",
    "masked: truncated": "it was cut at max_tokens, and algo.truncated = mask",
    "masked: in no pair": "other samples of its group are compared",
    "failed": "the grader failed, so there is no reward",
    "empty": "it has no sampled token",
    NO_ADVANTAGE: "it did exactly as well as expected",
    CLIPPED: "the ratio has left the clip range on the side the advantage pushes to",
    NOT_FINITE: "its log-probability, ratio or advantage is not a finite number",
    CORRECTED: "the learner and the sampler disagree too much about it",
}


def explain_reason(reason: str) -> str:
    """Returns "reason: explanation" for a reason that REASONS knows, else the reason alone.

    >>> explain_reason("empty"), explain_reason("not accepted")
    ('empty: it has no sampled token', 'not accepted')
    """
    return f"{reason}: {REASONS[reason]}" if reason in REASONS else reason


def format_number(value: float) -> str:
    """Returns a number as text in few characters; whole numbers below a million without decimals.

    >>> format_number(1.0), format_number(0.25), format_number(-2.0)
    ('1', '0.250', '-2')
    """
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e6 else format_compact(value)


def format_signed(value: float) -> str:
    """Returns a number as text in few characters, with a plus sign if it is above 0.

    >>> format_signed(0.25), format_signed(-2.0), format_signed(0.0)
    ('+0.250', '-2', '0')
    """
    return f"+{format_number(value)}" if value > 0 else format_number(value)


def format_share(share: float | None) -> str:
    """Returns a share of the signal as a percentage; "?" if it is None, which means not known.

    >>> format_share(0.25), format_share(None)
    ('25.0%', '?')
    """
    return "?" if share is None else f"{share:.1%}"


def format_count(n: int, noun: str) -> str:
    """Returns a count with its noun; the noun gets an "s" unless the count is 1.

    >>> format_count(1, "sample"), format_count(3, "sample")
    ('1 sample', '3 samples')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def format_ranges(numbers: Sequence[int]) -> str:
    """Returns numbers, which must be sorted, as text with neighbours joined into ranges.

    >>> format_ranges([1, 2, 3, 7, 9, 10])
    '1-3, 7, 9-10'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def format_total(total: int, kinds: Counter[str]) -> str:
    """Returns a total and how many of each kind it contains, as text; without kinds, "none in the loss" follows it.

    >>> format_total(8, Counter({"in the loss": 6, "out: constant reward": 2}))
    '8: 6 in the loss, 2 out: constant reward'
    """
    return f"{total}: " + (", ".join(f"{n} {kind}" for kind, n in kinds.items()) or "none in the loss")


def mean(values: Sequence[float]) -> float:
    """Returns the mean of at least one value."""
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float:
    """Returns the standard deviation of a sample (divides by n - 1); 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


def format_mean_std(values: Sequence[float]) -> str:
    """Returns mean and standard deviation (n - 1) as text; "none" without values.

    >>> format_mean_std([1.0, 0.0]), format_mean_std([])
    ('0.500 ± 0.707', 'none')
    """
    return f"{format_number(mean(values))} ± {format_number(std(values))}" if values else "none"


def format_spread(values: Sequence[float]) -> str:
    """Returns mean, standard deviation, smallest and largest value as text. Needs at least one value.

    >>> format_spread([1.0, 0.0])
    '0.500 ± 0.707, from 0 to 1'
    """
    return f"{format_mean_std(values)}, from {format_number(min(values))} to {format_number(max(values))}"
