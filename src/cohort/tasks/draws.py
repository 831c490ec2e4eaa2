"""Random draws from a counter-based hash: the key alone decides them, on every platform."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """A stream of draws named by its key.

    >>> first, second = Draws("doc", 7), Draws("doc", 7)
    >>> [first.below(100) for _ in range(20)] == [second.below(100) for _ in range(20)]
    True
    """

    def __init__(self, *key: str | int) -> None:
        self._key = blake2b("\x1f".join(map(repr, key)).encode(), digest_size=32).digest()
        self._block = b""
        self._used = 0

    def below(self, n: int) -> int:
        """An integer in [0, n), n < 2**32; 64 bits scaled down leave a bias below 2**-32."""
        offset = self._used % 8
        if offset == 0:
            counter = (self._used // 8).to_bytes(8, "little")
            self._block = blake2b(counter, key=self._key, digest_size=64).digest()
        self._used += 1
        word = int.from_bytes(self._block[offset * 8 : offset * 8 + 8], "little")
        return (word * n) >> 64

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + self.below(high - low + 1)

    def choice(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]


def permutation(n: int, *key: str | int) -> list[int]:
    """The numbers 0..n-1 in an order named by the key: sorted by their keyed hashes.

    >>> sorted(permutation(5, "doc", 0)) == [0, 1, 2, 3, 4]
    True
    """
    secret = blake2b("\x1f".join(map(repr, key)).encode(), digest_size=32).digest()
    start = blake2b(key=secret, digest_size=16)

    def place(index: int) -> bytes:
        state = start.copy()
        state.update(index.to_bytes(8, "little"))
        return state.digest()

    return sorted(range(n), key=place)
