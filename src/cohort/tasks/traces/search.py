"""Countdown by trial: every way to join the numbers, as steps, expression and value.

>>> best = next(t for t in tries([3, 7, 25]) if t.value == 46)
>>> best.text, best.expression
('3*7=21, 21+25=46', '(3*7)+25')
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True, slots=True)
class Try:
    """One way to use all numbers."""

    steps: tuple[str, ...]
    expression: str
    value: int

    @property
    def text(self) -> str:
        return ", ".join(self.steps)


Number = tuple[int, str]  # its value and how it was made


def tries(numbers: list[int]) -> Iterator[Try]:
    """All ways with whole, non-negative intermediate results, in a fixed order."""
    yield from joined([(n, str(n)) for n in numbers], ())


def joined(pool: list[Number], steps: tuple[str, ...]) -> Iterator[Try]:
    """Join two of the pool in every way, and go on with one number fewer."""
    if len(pool) == 1:
        yield Try(steps, pool[0][1], pool[0][0])
        return
    for i, j in combinations(range(len(pool)), 2):
        rest = [p for k, p in enumerate(pool) if k not in (i, j)]
        for a, b, op, value in results(pool[i], pool[j]):
            joint = (value, wrapped(a[1]) + op + wrapped(b[1]))
            yield from joined([joint, *rest], (*steps, f"{a[0]}{op}{b[0]}={value}"))


def wrapped(text: str) -> str:
    return text if text.isdigit() else f"({text})"


def results(x: Number, y: Number) -> Iterator[tuple[Number, Number, str, int]]:
    """The sums of two numbers that stay whole and non-negative."""
    big, small = (x, y) if x[0] >= y[0] else (y, x)
    yield x, y, "+", x[0] + y[0]
    yield big, small, "-", big[0] - small[0]
    yield x, y, "*", x[0] * y[0]
    if small[0] and big[0] % small[0] == 0:
        yield big, small, "/", big[0] // small[0]
