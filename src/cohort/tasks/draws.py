"""Random draws from a counter-based hash: their key alone decides them, on every platform."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """A sequence of random draws that its key decides: equal keys give equal draws.

    >>> first, second = Draws("doc", 7), Draws("doc", 7)
    >>> [first.below(100) for _ in range(20)] == [second.below(100) for _ in range(20)]
    True
    """

    def __init__(self, *key: str | int) -> None:
        self._key = blake2b("\x1f".join(map(repr, key)).encode(), digest_size=32).digest()
        self._block = b""
        self._used = 0

    def below(self, n: int) -> int:
        """Returns a random integer from 0 to n - 1, for 1 <= n < 2**32."""
        # A hash has 64 bytes: eight words of 64 bits, each for one draw.
        offset = self._used % 8
        if offset == 0:
            counter = (self._used // 8).to_bytes(8, "little")
            self._block = blake2b(counter, key=self._key, digest_size=64).digest()
        self._used += 1
        word = int.from_bytes(self._block[offset * 8 : offset * 8 + 8], "little")
        # Scaling 64 bits down to n values leaves a bias below 2**-32, so no draw has to be rejected.
        return (word * n) >> 64

    def between(self, low: int, high: int) -> int:
        """Returns a random integer from low to high, both included."""
        return low + self.below(high - low + 1)

    def choice(self, items: Sequence[T]) -> T:
        """Returns one of the items at random, all with equal probability. Raises IndexError if there are none."""
        return items[self.below(len(items))]


def make_permutation(n: int, *key: str | int) -> list[int]:
    """Returns the numbers 0 to n - 1 in a random order. Equal keys give equal orders.

    >>> sorted(make_permutation(5, "doc", 0)) == [0, 1, 2, 3, 4]
    True
    """
    secret = blake2b("\x1f".join(map(repr, key)).encode(), digest_size=32).digest()
    start = blake2b(key=secret, digest_size=16)

    def hash_index(index: int) -> bytes:
        """Returns the keyed hash of a number, its sort key."""
        state = start.copy()
        state.update(index.to_bytes(8, "little"))
        return state.digest()

    return sorted(range(n), key=hash_index)
