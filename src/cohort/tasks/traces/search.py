"""Countdown by trial and error: every way to combine the numbers, with its steps, expression and value.

>>> best = next(attempt for attempt in list_attempts([3, 7, 25]) if attempt.value == 46)
>>> best.text, best.expression
('3*7=21, 21+25=46', '(3*7)+25')
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to combine all numbers."""

    steps: tuple[str, ...]
    expression: str
    value: int

    @property
    def text(self) -> str:
        """The steps as one text, separated by commas."""
        return ", ".join(self.steps)


Number = tuple[int, str]  # a value and the expression that it comes from


def list_attempts(numbers: list[int]) -> Iterator[Attempt]:
    """Yields all ways to combine the numbers with whole, non-negative intermediate results, in a fixed order.

    Ways that differ only in the order of their steps are all given. Nothing for an empty list.
    """
    yield from join_numbers([(n, str(n)) for n in numbers], ())


def join_numbers(pool: list[Number], steps: tuple[str, ...]) -> Iterator[Attempt]:
    """Yields all ways to combine the numbers of the pool to one.

    `steps` are the texts of the steps that led to the pool; they come first in every attempt. Every pair of numbers is
    replaced by each of its results, and the smaller pool is combined in turn.
    """
    if len(pool) == 1:
        yield Attempt(steps, pool[0][1], pool[0][0])
        return
    for i, j in combinations(range(len(pool)), 2):
        rest = [p for k, p in enumerate(pool) if k not in (i, j)]
        for a, b, op, value in list_results(pool[i], pool[j]):
            joint = (value, parenthesise(a[1]) + op + parenthesise(b[1]))
            yield from join_numbers([joint, *rest], (*steps, f"{a[0]}{op}{b[0]}={value}"))


def parenthesise(text: str) -> str:
    """Returns an expression in parentheses; a single number stays without."""
    return text if text.isdigit() else f"({text})"


def list_results(x: Number, y: Number) -> Iterator[tuple[Number, Number, str, int]]:
    """Yields the operations on two numbers that have a whole, non-negative result.

    Each is (left number, right number, operator, result). For - and / the larger number is on the left, and division by
    0 is left out.
    """
    # Only the larger minus or over the smaller is tried: the other way would be negative or a fraction.
    big, small = (x, y) if x[0] >= y[0] else (y, x)
    yield x, y, "+", x[0] + y[0]
    yield big, small, "-", big[0] - small[0]
    yield x, y, "*", x[0] * y[0]
    if small[0] and big[0] % small[0] == 0:
        yield big, small, "/", big[0] // small[0]
