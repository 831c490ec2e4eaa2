"""What a token may see while sampling: its prompt, stored once a group, and what its own slot drew. Exact.

Letters: T tokens, B rows (slots), Q queries of a row and KV head, K KV heads, g query heads a KV head,
D head size, P prompt positions, R own positions, W = P + R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.engines.native.kv import Arena, Pool, Prefix
from cohort.models.decoder import Attend

IMBALANCE = 4  # queries padded beyond this factor: read a crowded prompt several times instead


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """The rows whose prompts lie in one pool: their queries against each prompt are one matrix product.

    Row i of the part is query `slot[i]` of a grid of `num` prompts x `siblings`; `rows_of` fills the grid.
    """

    pool: Pool
    entries: Tensor | None  # [num] in the pool; None = its first num
    num: int
    siblings: int
    width: int  # longest prompt
    rows_of: Tensor | None  # [num * siblings] rows of the batch; None = in order already
    slot: Tensor | None  # [rows of the part]; None = in order already
    rows: Tensor | None  # [rows of the part], where they are in the batch; None = the part is the whole batch

    def read(self, stored: Tensor) -> Tensor:
        """[entries, K, room, D] -> [num * K, width, D], without a copy when all entries are read."""
        picked = stored[: self.num] if self.entries is None else stored.index_select(0, self.entries)
        return picked.reshape(-1, self.pool.room, stored.shape[-1])[:, : self.width]

    def group(self, x: Tensor) -> Tensor:
        """[B, K, Q, n] -> [num * K, siblings * Q, n]"""
        _, K, Q, n = x.shape
        grid = x if self.rows_of is None else x.index_select(0, self.rows_of)
        return grid.view(self.num, self.siblings, K, Q, n).transpose(1, 2).reshape(self.num * K, -1, n)

    def ungroup(self, x: Tensor, K: int) -> Tensor:
        """[num * K, siblings * Q, n] -> [rows of the part, K, Q, n]"""
        n = x.shape[-1]
        grid = x.view(self.num, K, self.siblings, -1, n).transpose(1, 2).reshape(self.num * self.siblings, K, -1, n)
        return grid if self.slot is None else grid.index_select(0, self.slot)

    def scores(self, layer: int, q: Tensor) -> Tensor:
        keys = self.read(self.pool.arena.keys(layer))
        return self.ungroup(torch.bmm(self.group(q), keys.transpose(1, 2)), q.shape[1])

    def mixture(self, layer: int, weights: Tensor) -> Tensor:
        values = self.read(self.pool.arena.values(layer))
        return self.ungroup(torch.bmm(self.group(weights[..., : self.width]), values), weights.shape[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """The prompts of a batch of rows."""

    parts: list[Shared]
    width: int
    bias: Tensor  # [B, P], 0 where the row's prompt has a token, -inf beyond

    def scores(self, layer: int, q: Tensor) -> Tensor:
        """q [B, K, Q, D] -> [B, K, Q, P]"""
        if len(self.parts) == 1:
            return self.parts[0].scores(layer, q)
        out = q.new_zeros(*q.shape[:3], self.width)
        for part in self.parts:
            assert part.rows is not None
            out[..., : part.width].index_copy_(0, part.rows, part.scores(layer, q))
        return out

    def mixture(self, layer: int, weights: Tensor) -> Tensor:
        """weights [B, K, Q, P] -> [B, K, Q, D]"""
        if len(self.parts) == 1:
            return self.parts[0].mixture(layer, weights)
        D = self.parts[0].pool.arena.config.head_dim
        out = weights.new_empty(*weights.shape[:3], D)
        for part in self.parts:
            assert part.rows is not None
            out.index_copy_(0, part.rows, part.mixture(layer, weights))
        return out


def plan(prefixes: Sequence[Prefix], dtype: torch.dtype, device: torch.device) -> Prompts:
    """How the rows with these prefixes read them. Host work, done when rows change, not at every token."""
    pools: dict[int, list[int]] = {}
    for row, prefix in enumerate(prefixes):
        assert prefix.pool is not None
        pools.setdefault(prefix.pool.room, []).append(row)
    whole = len(pools) == 1
    parts = [_part([prefixes[r] for r in rows], rows, whole, device) for _, rows in sorted(pools.items())]
    width = max(part.width for part in parts)
    lengths = torch.tensor([len(p.tokens) for p in prefixes], device=device)
    return Prompts(parts=parts, width=width, bias=bias_below(lengths, width, dtype))


def _part(prefixes: list[Prefix], rows: list[int], whole: bool, device: torch.device) -> Shared:
    pool = prefixes[0].pool
    assert pool is not None
    crowd: dict[int, list[int]] = {}  # entry -> members, as indices into rows
    for i, prefix in enumerate(prefixes):
        crowd.setdefault(prefix.entry, []).append(i)
    num, most = len(pool.prefixes), max(len(members) for members in crowd.values())
    if num * most <= IMBALANCE * len(rows):
        siblings, entries = most, list(range(num))
        grid = [crowd.get(e, []) for e in entries]
    else:
        siblings = -(-len(rows) // len(crowd))
        chunks = [(e, m[i : i + siblings]) for e, m in sorted(crowd.items()) for i in range(0, len(m), siblings)]
        entries, grid = [e for e, _ in chunks], [m for _, m in chunks]
    fill = [rows[0]] * (len(grid) * siblings)  # a place without a row computes something nobody reads
    slot = [0] * len(rows)
    for g, members in enumerate(grid):
        for j, i in enumerate(members):
            fill[g * siblings + j] = rows[i]
            slot[i] = g * siblings + j
    in_order = whole and fill == rows
    return Shared(
        pool=pool,
        entries=None if entries == list(range(len(entries))) else torch.tensor(entries, device=device),
        num=len(entries),
        siblings=siblings,
        width=max(len(p.tokens) for p in prefixes),
        rows_of=None if in_order else torch.tensor(fill, device=device),
        slot=None if slot == list(range(len(fill))) else torch.tensor(slot, device=device),
        rows=None if whole else torch.tensor(rows, device=device),
    )


def bias_below(lengths: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[..., width]: 0 at positions below the length, -inf from it on."""
    seen = torch.arange(width, device=lengths.device) < lengths[..., None]
    return torch.zeros(seen.shape, dtype=dtype, device=lengths.device).masked_fill_(~seen, float("-inf"))


def two_part(layer: int, q: Tensor, prompts: Prompts, own: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
    """One softmax over the prompt's positions and the row's own.

    q [B, K, Q, D]; own = keys and values [B * K, R, D]; bias [B, 1, Q or 1, W] -> [B, K, Q, D]
    """
    B, K, Q, D = q.shape
    q = q * D**-0.5
    keys, values = own
    own_scores = torch.bmm(q.reshape(B * K, Q, D), keys.transpose(1, 2)).view(B, K, Q, -1)
    scores = torch.cat([prompts.scores(layer, q), own_scores], dim=-1).add_(bias)
    weights = torch.softmax(scores, dim=-1)  # [B, K, Q, W]
    mixed = torch.bmm(weights.view(B * K, Q, -1)[..., prompts.width :], values).view(B, K, Q, D)
    return mixed.add_(prompts.mixture(layer, weights[..., : prompts.width]))


def own_views(arena: Arena, layer: int, first: int, rows: int, room: int) -> tuple[Tensor, Tensor]:
    """Keys and values of `rows` slots from `first` on, `room` tokens each: views, [rows * K, room, D]."""

    def cut(stored: Tensor) -> Tensor:
        return stored[first : first + rows].view(-1, arena.room, stored.shape[-1])[:, :room]

    return cut(arena.keys(layer)), cut(arena.values(layer))


def decode_attend(arena: Arena, prompts: Prompts, lengths: Tensor, longest: int) -> Attend:
    """One new token for each of the slots 0 .. B - 1, which hold `lengths` [B] <= longest of their own."""
    rows = lengths.shape[0]
    places = arena.places(torch.arange(rows, device=lengths.device), lengths)
    own_bias = bias_below(lengths + 1, longest + 1, prompts.bias.dtype)
    bias = torch.cat([prompts.bias, own_bias], dim=1)[:, None, None]  # [B, 1, 1, W]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        arena.write(layer, places, k, v)
        return two_part(layer, q, prompts, own_views(arena, layer, 0, rows, longest + 1), bias)

    return attend


def extend_attend(arena: Arena, prompts: Prompts, first: int, have: int, counts: list[int]) -> Attend:
    """counts[i] > 0 new tokens, flat, for the slots from `first` on, which hold `have` own tokens each."""
    rows, most = len(counts), max(counts)
    device, num = prompts.bias.device, torch.tensor(counts, device=prompts.bias.device)
    row = torch.repeat_interleave(torch.arange(rows, device=device), num)  # [T]
    at = torch.arange(len(row), device=device) - torch.repeat_interleave(num.cumsum(0) - num, num)
    places = arena.places(first + row, have + at)
    padded = row * most + at  # [T] in [rows * most]
    causal = bias_below(have + 1 + torch.arange(most, device=device), have + most, prompts.bias.dtype)
    bias = torch.cat(
        [
            prompts.bias[:, None].expand(rows, most, prompts.width),
            causal[None].expand(rows, most, have + most),
        ],
        dim=-1,
    )  # [B, most, W]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        arena.write(layer, places, k, v)
        _, K, g, D = q.shape
        grid = q.new_zeros(rows * most, K, g, D).index_copy_(0, padded, q).view(rows, most, K, g, D)
        folded = grid.transpose(1, 2).reshape(rows, K, most * g, D)
        wide = bias[:, :, None].expand(rows, most, g, -1).reshape(rows, 1, most * g, -1)
        mixed = two_part(layer, folded, prompts, own_views(arena, layer, first, rows, have + most), wide)
        flat = mixed.view(rows, K, most, g, D).transpose(1, 2).reshape(rows * most, K, g, D)
        return flat.index_select(0, padded)

    return attend


def prefill_attend(batches: list[list[Prefix]]) -> Attend:
    """Whole prefixes, flat and in order; the prefixes of one list lie in one pool.

    Within a list prompts are padded on the right to the longest: a causal mask hides the padding from every
    real token, so no other mask is needed.
    """
    steps = []
    begin = 0
    for prefixes in batches:
        pool = prefixes[0].pool
        assert pool is not None
        device, most = pool.arena.device, max(len(p.tokens) for p in prefixes)
        num = torch.tensor([len(p.tokens) for p in prefixes], device=device)
        row = torch.repeat_interleave(torch.arange(len(prefixes), device=device), num)
        at = torch.arange(len(row), device=device) - torch.repeat_interleave(num.cumsum(0) - num, num)
        entry = torch.tensor([p.entry for p in prefixes], device=device).index_select(0, row)
        grid = (len(prefixes), most, row * most + at)
        steps.append((pool.arena, slice(begin, begin + len(row)), pool.arena.places(entry, at), grid))
        begin += len(row)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for arena, part, places, grid in steps:
            arena.write(layer, places, k[part], v[part])
            out[part] = _causal(q[part], k[part], v[part], *grid)
        return out

    return attend


def _causal(q: Tensor, k: Tensor, v: Tensor, rows: int, most: int, padded: Tensor) -> Tensor:
    """q [T, K, g, D], k, v [T, K, D]; token t is place padded[t] of a grid of rows x most."""
    T, K, g, D = q.shape

    def grid(x: Tensor) -> Tensor:  # [T, K, h, D] -> [rows, K * g, most, D]
        full = x if len(x) == rows * most else x.new_zeros(rows * most, *x.shape[1:]).index_copy_(0, padded, x)
        return full.view(rows, most, K, -1, D).expand(-1, -1, -1, g, -1).flatten(2, 3).transpose(1, 2)

    mixed = F.scaled_dot_product_attention(grid(q), grid(k[:, :, None]), grid(v[:, :, None]), is_causal=True)
    flat = mixed.transpose(1, 2).reshape(rows * most, K, g, D)
    return flat if len(flat) == T else flat.index_select(0, padded)
