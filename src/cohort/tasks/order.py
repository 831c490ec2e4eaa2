"""The order in which a prompt stream visits rows: a pure function of the position in the stream.

One task visits all its rows in every epoch, in a new order. A mixture of tasks takes turns between them by their
shares, and every task has epochs of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import Protocol

from cohort.tasks.draws import make_permutation

# Positions after which the pattern of a mixture repeats. It is kept in memory.
MAX_PATTERN = 10_000


@dataclass(frozen=True, slots=True)
class Visit:
    """A row by its index, and how often it was visited before."""

    index: int
    visit: int


class Order(Protocol):
    """Which row each position of a stream visits."""

    def locate(self, position: int) -> Visit:
        """Returns the row at a position, counted from 0. The order never ends."""

    def count_most(self, num_prompts: int) -> dict[str, int]:
        """Returns how many of `num_prompts` consecutive positions a task has at most, by the task's label."""


class EpochOrder:
    """The order of one task: every epoch is a new permutation of its rows."""

    def __init__(self, name: str, num_rows: int, seed: int, split: str) -> None:
        self.name = name
        self.num_rows = num_rows
        self._key = (seed, name, split)
        self._last: tuple[int, list[int]] = (-1, [])  # the epoch asked for last, with its permutation

    def locate(self, position: int) -> Visit:
        """Returns the row at a position. Raises ZeroDivisionError if there are no rows."""
        epoch, place = divmod(position, self.num_rows)
        if self._last[0] != epoch:
            self._last = (epoch, make_permutation(self.num_rows, *self._key, epoch))
        return Visit(self._last[1][place], epoch)

    def count_most(self, num_prompts: int) -> dict[str, int]:
        """Returns all positions for the only task."""
        return {self.name: num_prompts}


class MixedOrder:
    """The order of a mixture: positions go to the tasks in a fixed pattern, and each task has an order of its own.

    `labels` has the task's label of every row, `weights` the positions that each label has in the pattern; a label
    without one is not visited. The rows of a task come in the order that a stream of this task alone has.
    """

    def __init__(self, labels: Sequence[str], weights: Mapping[str, int], seed: int, split: str) -> None:
        self._weights = {label: weight for label, weight in weights.items() if weight}
        self._members: dict[str, list[int]] = {label: [] for label in self._weights}
        for index, label in enumerate(labels):
            if label in self._members:
                self._members[label].append(index)
        self._orders = {label: EpochOrder(label, len(members), seed, split) for label, members in self._members.items()}
        self._pattern = make_pattern(tuple(self._weights.values()))
        self._names = list(self._weights)

    def locate(self, position: int) -> Visit:
        """Returns the row at a position. Raises ZeroDivisionError if its task has no rows."""
        cycle, place = divmod(position, len(self._pattern))
        number, before = self._pattern[place]
        label = self._names[number]
        own = self._orders[label].locate(cycle * self._weights[label] + before)
        return Visit(self._members[label][own.index], own.visit)

    def count_most(self, num_prompts: int) -> dict[str, int]:
        """Returns the most positions that each task has in `num_prompts` consecutive ones, wherever they begin."""
        cycles, rest = divmod(num_prompts, len(self._pattern))
        twice = [number for number, _ in (*self._pattern, *self._pattern)]
        most = {}
        for number, label in enumerate(self._names):
            running = twice[:rest].count(number)
            best = running
            # A window of `rest` positions is moved through the pattern once.
            for start in range(len(self._pattern)):
                running += (twice[start + rest] == number) - (twice[start] == number)
                best = max(best, running)
            most[label] = cycles * self._weights[label] + best
        return most


@lru_cache(maxsize=64)
def make_pattern(weights: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Returns a pattern in which task number i has weights[i] positions, spread as evenly as possible.

    A position is (number of its task, how many positions this task had before). After any number n of positions, a task
    has had n times its share, but for less than 1.

    >>> make_pattern((2, 1))
    ((0, 0), (0, 1), (1, 0))
    """
    total = sum(weights)
    counts = [0] * len(weights)
    pattern = []
    for position in range(1, total + 1):
        # A task may not be ahead of its share. Of the others, the one whose next position is due first comes next.
        waiting = [i for i, weight in enumerate(weights) if counts[i] * total < position * weight]
        number = min(waiting, key=lambda i: (Fraction(counts[i] + 1, weights[i]), i))
        pattern.append((number, counts[number]))
        counts[number] += 1
    return tuple(pattern)


def make_weights(shares: Sequence[float]) -> tuple[int, ...]:
    """Returns the smallest whole numbers in the exact proportion of the shares, which are finite and at least 0.

    A share counts as the decimal number that is written.

    >>> make_weights((0.7, 0.2, 0.1)), make_weights((50.0, 100.0))
    ((7, 2, 1), (1, 2))
    """
    exact = [Fraction(repr(share)) for share in shares]
    common = lcm(*(share.denominator for share in exact))
    whole = [int(share * common) for share in exact]
    divisor = gcd(*whole) or 1
    return tuple(number // divisor for number in whole)
