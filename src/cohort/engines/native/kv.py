"""Keys and values in memory: an arena for each slot's own tokens, and one pool per length class for shared prompts.

Letters: L layers, K KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.models.config import ModelConfig


class Arena:
    """Keys and values of `num_sequences` sequences with `room` tokens each: [2, L, num_sequences, K, room, D].

    It grows on demand. New memory is zeroed: masked positions get weight zero, and zero times garbage could be NaN.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype, self.device = dtype, device
        self.num_sequences, self.room = 0, 0
        self.kv = self._allocate(0, 0)
        self.heads = torch.arange(config.num_kv_heads, device=device)

    def _allocate(self, num: int, room: int) -> Tensor:
        """Returns a new zeroed tensor for `num` sequences of `room` tokens: [2, L, num, K, room, D]."""
        c = self.config
        shape = (2, c.num_layers, num, c.num_kv_heads, room, c.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def reserve(self, num: int, room: int) -> None:
        """Grows the arena to at least `num` sequences of at least `room` tokens. Stored KV stays, at new addresses.

        Does nothing if it is large enough.
        """
        if num <= self.num_sequences and room <= self.room:
            return
        # Doubling bounds all copying together by the final size.
        num = self.num_sequences if num <= self.num_sequences else max(num, 2 * self.num_sequences)
        room = self.room if room <= self.room else max(room, 2 * self.room)
        grown = self._allocate(num, room)
        grown[:, :, : self.num_sequences, :, : self.room] = self.kv
        self.kv = grown
        self.num_sequences, self.room = num, room

    def keys(self, layer: int) -> Tensor:
        """Returns the keys of a layer as a view [num_sequences, K, room, D]."""
        return self.kv[0, layer]

    def values(self, layer: int) -> Tensor:
        """Returns the values of a layer as a view [num_sequences, K, room, D]."""
        return self.kv[1, layer]

    def locate_tokens(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Returns the rows at which tokens lie in a layer seen as [num_sequences * K * room, D].

        Token t is at `position[t]` of sequence `sequence[t]`, both [T]. The result is [T * K]: one index per token and
        KV head, token after token. It is wrong once `reserve` has changed `room`.
        """
        heads = sequence[:, None] * self.config.num_kv_heads + self.heads
        return (heads * self.room + position[:, None]).flatten()

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores keys k and values v [T, K, D] of a layer at `places` [T * K], which come from `locate_tokens`."""
        D = self.config.head_dim
        # A view of the layer as rows of D numbers, so that one index per row is enough.
        for half, new in ((0, k), (1, v)):
            self.kv[half, layer].view(-1, D).index_copy_(0, places, new.reshape(-1, D))

    def move_sequences(self, source: list[int], target: list[int], room: int) -> None:
        """Copies the KV of the first `room` tokens of the source sequences over the target sequences, pair by pair.

        The sources do not change, unless they are targets too.
        """
        if source:
            self.kv[:, :, target, :, :room] = self.kv[:, :, source, :, :room]

    def copy_out(self, sequence: int, num: int) -> Tensor:
        """Returns a copy of the KV of the first `num` tokens of a sequence: [2, L, K, num, D]."""
        return self.kv[:, :, sequence, :, :num].clone()

    def copy_in(self, sequence: int, kv: Tensor) -> None:
        """Stores KV [2, L, K, n, D] as that of the first n tokens of a sequence. It must have room for them."""
        self.kv[:, :, sequence, :, : kv.shape[3]] = kv

    def release(self) -> None:
        """Frees the memory, with all stored KV. The next `reserve` allocates again."""
        self.num_sequences, self.room = 0, 0
        self.kv = self._allocate(0, 0)


@dataclass(eq=False, kw_only=True, slots=True)
class Prefix:
    """The leading tokens that the requests of a group share.

    It exists as long as one of these requests does, or KV that is kept of one.
    """

    tokens: tuple[int, ...]
    num_users: int = 0  # requests submitted and not ended, and KV kept of ended ones
    pool: PrefixPool | None = None  # where its KV lies; None = not computed (yet, or any more)
    entry: int = -1  # index in the pool; -1 = none
    last_hidden: Tensor | None = None  # [d], final hidden state of the last token: every sibling's first draw uses it


class PrefixPool:
    """The computed prefixes of one length class. They fill entries 0 .. n - 1, so reading all needs no gather."""

    def __init__(self, arena: Arena, room: int) -> None:
        self.arena, self.room = arena, room
        self.prefixes: list[Prefix] = []

    def add(self, prefix: Prefix) -> None:
        """Gives the prefix the next entry (place for its KV): sets its `pool` and `entry`.

        The caller must compute the KV.
        """
        self.arena.reserve(len(self.prefixes) + 1, self.room)
        prefix.pool, prefix.entry = self, len(self.prefixes)
        self.prefixes.append(prefix)

    def remove(self, prefix: Prefix) -> None:
        """Frees the entry of the prefix, whose KV and last hidden state are lost; its `pool` becomes None.

        The last prefix of the pool moves into the gap, with its KV and a new `entry`.
        """
        last = self.prefixes.pop()
        # Entries 0 .. n - 1 must stay filled.
        if last is not prefix:
            self.arena.move_sequences([last.entry], [prefix.entry], len(last.tokens))
            last.entry = prefix.entry
            self.prefixes[last.entry] = last
        prefix.pool, prefix.entry = None, -1
        prefix.last_hidden = None


class PrefixStore:
    """All shared prefixes that have users, by their tokens."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype, self.device = dtype, device
        self.by_tokens: dict[tuple[int, ...], Prefix] = {}
        self.pools: dict[int, PrefixPool] = {}  # by length class

    def add_user(self, tokens: tuple[int, ...]) -> Prefix:
        """Returns the prefix with these tokens, made now if it is unknown, and counts one more request that uses it."""
        prefix = self.by_tokens.setdefault(tokens, Prefix(tokens=tokens))
        prefix.num_users += 1
        return prefix

    def remove_user(self, prefix: Prefix) -> None:
        """Counts one request less that uses the prefix. After the last one, forgets the prefix and frees its entry."""
        prefix.num_users -= 1
        if prefix.num_users == 0:
            del self.by_tokens[prefix.tokens]
            if prefix.pool is not None:
                prefix.pool.remove(prefix)

    def allocate(self, prefix: Prefix) -> None:
        """Gives the prefix a place for its KV, in the pool of its length class. The caller must compute the KV."""
        room = round_to_length_class(len(prefix.tokens))
        if room not in self.pools:
            self.pools[room] = PrefixPool(Arena(self.config, self.dtype, self.device), room)
        self.pools[room].add(prefix)

    def drop_computed(self) -> None:
        """Marks every prefix as not computed, as new weights require. Prefixes stay known, memory stays allocated."""
        for pool in self.pools.values():
            for prefix in list(pool.prefixes):
                prefix.pool, prefix.entry = None, -1
                prefix.last_hidden = None
            pool.prefixes.clear()

    def release(self) -> None:
        """Marks every prefix as not computed and frees the memory of all KV. The prefixes stay known."""
        self.drop_computed()
        self.pools.clear()


def round_to_length_class(length: int) -> int:
    """Returns how many tokens of room a prefix of `length` tokens gets: the next of 32, 48, 64, 96, 128, 192, ...

    So there are few sizes, and above 32 tokens at most a third of the room is unused.

    >>> [round_to_length_class(n) for n in (1, 32, 33, 49, 65, 100, 129)]
    [32, 32, 48, 64, 96, 128, 192]
    """
    room = 32
    while room < length:
        # From a power of two to one and a half times it, from there to the next power of two.
        room = room * 3 // 2 if room & (room - 1) == 0 else room * 4 // 3
    return room
