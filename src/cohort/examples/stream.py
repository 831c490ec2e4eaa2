"""The order in which examples are trained on: passes over all of them, each in an order of its own.

What a step trains on is a pure function of seed and step, so a checkpoint need not store a position in the data.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol, TypeVar

from cohort.types import Group


class KeyedRow(Protocol):
    """A row with a place and a key."""

    @property
    def place(self) -> str:
        """Where the row comes from, for messages."""

    @property
    def key(self) -> str:
        """Names what the row asks: rows with equal keys are never in two splits."""


K = TypeVar("K", bound=KeyedRow)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleStream:
    """An endless sequence of groups: pass after pass over `groups`, `size` per step."""

    groups: Sequence[Group]
    size: int
    seed: int

    def list_groups(self, step: int) -> list[Group]:
        """Returns the groups of a step, counted from 0. The same step always has the same groups.

        A group that occurs again in a later pass has another `visit`, so that ids in a batch are unique.
        """
        places = (divmod(step * self.size + i, len(self.groups)) for i in range(self.size))
        return [self._get_group(number, place) for number, place in places]

    def _get_group(self, number: int, place: int) -> Group:
        """Returns the group at a place of a pass, both counted from 0."""
        group = self.groups[shuffle_pass(len(self.groups), self.seed, number)[place]]
        return replace(group, prompt=replace(group.prompt, visit=number), samples=[*map(replace, group.samples)])


@lru_cache(maxsize=4)
def shuffle_pass(num: int, seed: int, number: int) -> tuple[int, ...]:
    """Returns the numbers 0 to num - 1 in the order of a pass over the data, which seed and pass decide."""
    order = list(range(num))
    random.Random(f"{seed}/pass/{number}").shuffle(order)
    return tuple(order)


def count_steps(passes: float, num_examples: int, size: int) -> int:
    """Returns how many steps of `size` examples are needed for so many passes over the data; at least 1.

    >>> count_steps(2, 100, 32), count_steps(0.5, 100, 32)
    (7, 2)
    """
    return max(1, math.ceil(passes * num_examples / size))


def cut_held_out(rows: Sequence[K], share: float) -> tuple[list[K], list[K]]:
    """Returns the rows that stay for training, and about `share` of them that are held out.

    A hash of the key decides, so a row is on the same side whatever other rows there are, and for whatever seed.
    """
    held = [_hash_key(row.key) < share for row in rows]
    return [r for r, out in zip(rows, held, strict=True) if not out], [
        r for r, out in zip(rows, held, strict=True) if out
    ]


def _hash_key(key: str) -> float:
    """Returns a number from 0 to 1 that a key decides."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"cohort-examples").digest()
    return int.from_bytes(digest, "little") / 2**64
