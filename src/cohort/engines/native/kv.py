"""Keys and values in memory: an arena for what each slot drew, a pool a length class for shared prompts.

Letters: L layers, K KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.models.config import ModelConfig


class Arena:
    """Keys and values of `num` sequences of up to `room` tokens: [2, L, num, K, room, D], grown by need.

    New memory is zeroed: masked positions get weight zero, and zero times garbage could be NaN.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.num, self.room = 0, 0
        self.kv = self._zeros(0, 0)
        self.heads = torch.arange(config.num_kv_heads, device=device)

    def _zeros(self, num: int, room: int) -> Tensor:
        c = self.config
        shape = (2, c.num_layers, num, c.num_kv_heads, room, c.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def reserve(self, num: int, room: int) -> None:
        """Have at least this much; what is there stays. Doubling bounds the copying by the final size."""
        if num <= self.num and room <= self.room:
            return
        num = self.num if num <= self.num else max(num, 2 * self.num)
        room = self.room if room <= self.room else max(room, 2 * self.room)
        grown = self._zeros(num, room)
        grown[:, :, : self.num, :, : self.room] = self.kv
        self.kv, self.num, self.room = grown, num, room

    def keys(self, layer: int) -> Tensor:
        return self.kv[0, layer]  # [num, K, room, D]

    def values(self, layer: int) -> Tensor:
        return self.kv[1, layer]

    def places(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Rows of the tokens at (sequence, position) [T] in a layer seen as [num * K * room, D]: [T * K]."""
        heads = sequence[:, None] * self.config.num_kv_heads + self.heads
        return (heads * self.room + position[:, None]).flatten()

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v [T, K, D] to `places`."""
        D = self.config.head_dim
        for half, new in ((0, k), (1, v)):
            self.kv[half, layer].view(-1, D).index_copy_(0, places, new.reshape(-1, D))

    def move(self, source: list[int], target: list[int], room: int) -> None:
        """Copy the first `room` tokens of the source sequences over the target ones."""
        if source:
            self.kv[:, :, target, :, :room] = self.kv[:, :, source, :, :room]

    def release(self) -> None:
        """Give the memory back; the next `reserve` allocates anew."""
        self.num, self.room = 0, 0
        self.kv = self._zeros(0, 0)


@dataclass(eq=False, kw_only=True, slots=True)
class Prefix:
    """The leading tokens that requests of a group share. It lives as long as one of them does."""

    tokens: tuple[int, ...]
    users: int = 0  # requests submitted and not ended
    pool: Pool | None = None  # None: not computed (yet, or any more)
    entry: int = -1
    hidden: Tensor | None = None  # [d], final hidden state of the last token: every sibling's first draw


class Pool:
    """Computed prefixes of one length class. They fill entries 0 .. n - 1: reading them needs no gather."""

    def __init__(self, arena: Arena, room: int) -> None:
        self.arena, self.room = arena, room
        self.prefixes: list[Prefix] = []

    def add(self, prefix: Prefix) -> None:
        self.arena.reserve(len(self.prefixes) + 1, self.room)
        prefix.pool, prefix.entry = self, len(self.prefixes)
        self.prefixes.append(prefix)

    def remove(self, prefix: Prefix) -> None:
        last = self.prefixes.pop()
        if last is not prefix:  # the last one takes the place that became free
            self.arena.move([last.entry], [prefix.entry], len(last.tokens))
            last.entry = prefix.entry
            self.prefixes[last.entry] = last
        prefix.pool, prefix.entry, prefix.hidden = None, -1, None


class Prefixes:
    """Every shared prefix with a user, by its tokens."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.known: dict[tuple[int, ...], Prefix] = {}
        self.pools: dict[int, Pool] = {}

    def take(self, tokens: tuple[int, ...]) -> Prefix:
        """One more user of these tokens."""
        prefix = self.known.setdefault(tokens, Prefix(tokens=tokens))
        prefix.users += 1
        return prefix

    def leave(self, prefix: Prefix) -> None:
        """One user less; the last one frees the memory."""
        prefix.users -= 1
        if prefix.users == 0:
            del self.known[prefix.tokens]
            if prefix.pool is not None:
                prefix.pool.remove(prefix)

    def place(self, prefix: Prefix) -> None:
        """Give the prefix room, to be filled by a prefill."""
        room = length_class(len(prefix.tokens))
        if room not in self.pools:
            self.pools[room] = Pool(Arena(self.config, self.dtype, self.device), room)
        self.pools[room].add(prefix)

    def forget(self) -> None:
        """Drop every computed state, as new weights demand; users stay."""
        for pool in self.pools.values():
            for prefix in list(pool.prefixes):
                prefix.pool, prefix.entry, prefix.hidden = None, -1, None
            pool.prefixes.clear()

    def release(self) -> None:
        self.forget()
        self.pools.clear()


def length_class(length: int) -> int:
    """Room for a prefix: 32, 48, 64, 96, 128, 192, ...: few classes, at most a third of the memory unused.

    >>> [length_class(n) for n in (1, 32, 33, 49, 65, 100, 129)]
    [32, 32, 48, 64, 96, 128, 192]
    """
    room = 32
    while room < length:
        room = room * 3 // 2 if room & (room - 1) == 0 else room * 4 // 3
    return room
