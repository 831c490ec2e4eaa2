"""Exact attention while sampling: a token sees its prompt, stored once per group, and its own slot's tokens.

Letters: T tokens, B rows (slots), Q queries per row and KV head, K KV heads, g query heads per KV head,
D head size, P prompt positions, R own positions, W = P + R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.engines.native.kv import Arena, Prefix, PrefixPool
from cohort.models.decoder import Attend

# If padding would multiply the queries by more than this, a prompt with many rows is read several times instead.
MAX_PADDING_FACTOR = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """The rows whose prompts lie in one pool, arranged so that one batched matrix product reads all these prompts.

    The rows stand in a grid of `num_prompts` x `rows_per_prompt` places; places without a row are padding. The rows
    of the pool are numbered in the order of the batch: row i is at place `grid_places[i]`.
    """

    pool: PrefixPool
    entries: Tensor | None  # [num_prompts], entries of the pool; None = the first num_prompts
    num_prompts: int
    rows_per_prompt: int
    width: int  # tokens of the longest prompt
    grid_rows: Tensor | None  # [num_prompts * rows_per_prompt], batch row at each place; None = in order already
    grid_places: Tensor | None  # [rows of the pool], place of each row; None = in order already
    batch_rows: Tensor | None  # [rows of the pool], their rows in the batch; None = the pool has the whole batch

    def read_entries(self, stored: Tensor) -> Tensor:
        """Returns the planned prompts' keys or values: stored [entries, K, room, D] -> [num_prompts * K, width, D].

        It is a view, not a copy, if the prompts are the first entries of the pool.
        """
        picked = stored[: self.num_prompts] if self.entries is None else stored.index_select(0, self.entries)
        return picked.reshape(-1, self.pool.room, stored.shape[-1])[:, : self.width]

    def to_grid(self, x: Tensor) -> Tensor:
        """Returns the batch rows of this pool arranged by prompt. Padding repeats some row.

        x [B, K, Q, n] -> [num_prompts * K, rows_per_prompt * Q, n]
        """
        _, K, Q, n = x.shape
        grid = x if self.grid_rows is None else x.index_select(0, self.grid_rows)
        split = grid.view(self.num_prompts, self.rows_per_prompt, K, Q, n)
        return split.transpose(1, 2).reshape(self.num_prompts * K, -1, n)

    def from_grid(self, x: Tensor, K: int) -> Tensor:
        """Undoes `to_grid` and drops the padding. K is the number of KV heads.

        x [num_prompts * K, rows_per_prompt * Q, n] -> [rows of the pool, K, Q, n], in the order of the batch
        """
        n = x.shape[-1]
        split = x.view(self.num_prompts, K, self.rows_per_prompt, -1, n)
        grid = split.transpose(1, 2).reshape(self.num_prompts * self.rows_per_prompt, K, -1, n)
        return grid if self.grid_places is None else grid.index_select(0, self.grid_places)

    def compute_scores(self, layer: int, q: Tensor) -> Tensor:
        """Returns the products of this pool's queries with the keys of their prompts in one layer, without a mask.

        q [B, K, Q, D], of the whole batch -> [rows of the pool, K, Q, width]
        """
        keys = self.read_entries(self.pool.arena.keys(layer))
        return self.from_grid(torch.bmm(self.to_grid(q), keys.transpose(1, 2)), q.shape[1])

    def mix_values(self, layer: int, weights: Tensor) -> Tensor:
        """Returns, for this pool's rows, the values of their prompts in one layer, summed with attention weights.

        weights [B, K, Q, P], of the whole batch -> [rows of the pool, K, Q, D]
        """
        values = self.read_entries(self.pool.arena.values(layer))
        return self.from_grid(torch.bmm(self.to_grid(weights[..., : self.width]), values), weights.shape[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptPlan:
    """How the rows of a batch read their prompts: one plan per pool."""

    pools: list[PoolPlan]
    width: int  # P, tokens of the longest prompt
    bias: Tensor  # [B, P], 0 where the row's prompt has a token, -inf beyond

    def compute_scores(self, layer: int, q: Tensor) -> Tensor:
        """Returns the products of queries with the keys of their prompts in one layer: q [B, K, Q, D] -> [B, K, Q, P].

        They are not scaled. Columns beyond the end of a row's prompt hold arbitrary numbers; `bias` hides them.
        """
        if len(self.pools) == 1:
            return self.pools[0].compute_scores(layer, q)
        # Rows with shorter prompts keep 0 beyond their pool's width: the bias hides it.
        out = q.new_zeros(*q.shape[:3], self.width)
        for part in self.pools:
            assert part.batch_rows is not None
            out[..., : part.width].index_copy_(0, part.batch_rows, part.compute_scores(layer, q))
        return out

    def mix_values(self, layer: int, weights: Tensor) -> Tensor:
        """Returns the values of the prompts in one layer, summed with attention weights.

        weights [B, K, Q, P] -> [B, K, Q, D]
        """
        if len(self.pools) == 1:
            return self.pools[0].mix_values(layer, weights)
        D = self.pools[0].pool.arena.config.head_dim
        out = weights.new_empty(*weights.shape[:3], D)
        for part in self.pools:
            assert part.batch_rows is not None
            out.index_copy_(0, part.batch_rows, part.mix_values(layer, weights))
        return out


def plan_prompts(prefixes: Sequence[Prefix], dtype: torch.dtype, device: torch.device) -> PromptPlan:
    """Returns the plan by which the rows of a batch read their prompts' KV.

    `prefixes` has the prefix (shared prompt) of each row, which must be computed; `dtype` is the type of the attention
    scores. This is work on the host, done when the rows change, not at every token. The plan is invalid after a prefix
    of these pools was removed.
    """
    pools: dict[int, list[int]] = {}
    for row, prefix in enumerate(prefixes):
        assert prefix.pool is not None
        pools.setdefault(prefix.pool.room, []).append(row)
    whole = len(pools) == 1
    parts = [_plan_pool([prefixes[r] for r in rows], rows, whole, device) for _, rows in sorted(pools.items())]
    width = max(part.width for part in parts)
    lengths = torch.tensor([len(p.tokens) for p in prefixes], device=device)
    return PromptPlan(pools=parts, width=width, bias=make_length_bias(lengths, width, dtype))


def _plan_pool(prefixes: list[Prefix], rows: list[int], whole: bool, device: torch.device) -> PoolPlan:
    """Returns the plan for those batch rows whose prefixes lie in one pool.

    `rows` are their indices in the batch, `prefixes` their prefixes in the same order. `whole` says that they are all
    rows of the batch.
    """
    pool = prefixes[0].pool
    assert pool is not None
    crowd: dict[int, list[int]] = {}  # entry of the pool -> its rows, as indices into `rows`
    for i, prefix in enumerate(prefixes):
        crowd.setdefault(prefix.entry, []).append(i)
    num = len(pool.prefixes)
    most = max(len(members) for members in crowd.values())
    if num * most <= MAX_PADDING_FACTOR * len(rows):
        # Read every entry of the pool, without a gather, and pad each to the rows of the most crowded one.
        rows_per_prompt, entries = most, list(range(num))
        grid = [crowd.get(e, []) for e in entries]
    else:
        # Padding would waste too much: split crowded prompts into chunks of the average size.
        rows_per_prompt = -(-len(rows) // len(crowd))
        chunks = [
            (e, m[i : i + rows_per_prompt]) for e, m in sorted(crowd.items()) for i in range(0, len(m), rows_per_prompt)
        ]
        entries, grid = [e for e, _ in chunks], [m for _, m in chunks]
    # Places without a row compute row rows[0] again; these results are not read.
    fill = [rows[0]] * (len(grid) * rows_per_prompt)
    places = [0] * len(rows)
    for g, members in enumerate(grid):
        for j, i in enumerate(members):
            fill[g * rows_per_prompt + j] = rows[i]
            places[i] = g * rows_per_prompt + j
    # Indices are left out where they would change nothing, which saves a copy at every layer.
    in_order = whole and fill == rows
    return PoolPlan(
        pool=pool,
        entries=None if entries == list(range(len(entries))) else torch.tensor(entries, device=device),
        num_prompts=len(entries),
        rows_per_prompt=rows_per_prompt,
        width=max(len(p.tokens) for p in prefixes),
        grid_rows=None if in_order else torch.tensor(fill, device=device),
        grid_places=None if places == list(range(len(fill))) else torch.tensor(places, device=device),
        batch_rows=None if whole else torch.tensor(rows, device=device),
    )


def make_length_bias(lengths: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Returns a bias that hides positions when it is added to attention scores.

    For `lengths` of any shape [...] the result is [..., width], of type `dtype`: 0 at positions below the length, -inf
    from there on.
    """
    seen = torch.arange(width, device=lengths.device) < lengths[..., None]
    return torch.zeros(seen.shape, dtype=dtype, device=lengths.device).masked_fill_(~seen, float("-inf"))


def attend_prompt_and_own(
    layer: int, q: Tensor, prompts: PromptPlan, own: tuple[Tensor, Tensor], bias: Tensor
) -> Tensor:
    """Returns attention in one layer, with one softmax over each row's prompt and its own tokens.

    q [B, K, Q, D], scaled here; own = keys and values [B * K, R, D]; bias [B, 1, Q or 1, P + R], added to the scores,
    must hide what a query may not see -> [B, K, Q, D]
    """
    B, K, Q, D = q.shape
    # Scaled once here, so that both kinds of scores are.
    q = q * D**-0.5
    keys, values = own
    own_scores = torch.bmm(q.reshape(B * K, Q, D), keys.transpose(1, 2)).view(B, K, Q, -1)
    scores = torch.cat([prompts.compute_scores(layer, q), own_scores], dim=-1).add_(bias)
    weights = torch.softmax(scores, dim=-1)  # [B, K, Q, W]
    # The first P weights belong to the prompt, the rest to own tokens.
    mixed = torch.bmm(weights.view(B * K, Q, -1)[..., prompts.width :], values).view(B, K, Q, D)
    return mixed.add_(prompts.mix_values(layer, weights[..., : prompts.width]))


def view_own_kv(arena: Arena, layer: int, first: int, rows: int, room: int) -> tuple[Tensor, Tensor]:
    """Returns views of the keys and of the values of some slots in one layer, [rows * K, room, D] each.

    They show the first `room` own tokens of `rows` slots from slot `first` on.
    """

    def select(stored: Tensor) -> Tensor:
        """[num_sequences, K, room, D] -> [rows * K, room, D]"""
        return stored[first : first + rows].view(-1, arena.room, stored.shape[-1])[:, :room]

    return select(arena.keys(layer)), select(arena.values(layer))


def make_decode_attend(arena: Arena, prompts: PromptPlan, lengths: Tensor, longest: int) -> Attend:
    """Returns the attention function for a decode step: one new token for each of the slots 0 .. B - 1.

    The slots hold `lengths` [B] own tokens so far, at most `longest`. The function stores the new tokens' KV in the
    arena, which must have room for it, and attends to prompt, own tokens and the new token. It is for one step only.
    """
    rows = lengths.shape[0]
    places = arena.locate_tokens(torch.arange(rows, device=lengths.device), lengths)
    own_bias = make_length_bias(lengths + 1, longest + 1, prompts.bias.dtype)
    bias = torch.cat([prompts.bias, own_bias], dim=1)[:, None, None]  # [B, 1, 1, W]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, K, g, D], k, v [B, K, D] -> [B, K, g, D]"""
        arena.write(layer, places, k, v)
        return attend_prompt_and_own(layer, q, prompts, view_own_kv(arena, layer, 0, rows, longest + 1), bias)

    return attend


def make_extend_attend(arena: Arena, prompts: PromptPlan, first: int, done: list[int], counts: list[int]) -> Attend:
    """Returns the attention function for a forward that computes several own tokens per slot.

    Slot `first` + i holds done[i] own tokens already and gets counts[i] > 0 new ones. The tokens come flat, slot after
    slot. The function stores their KV in the arena, which must have room for it, and attends to prompt and
    own tokens, causally.
    """
    rows, most = len(counts), max(counts)
    longest = max(d + n for d, n in zip(done, counts, strict=True))  # own tokens of a slot after this forward
    device, num = prompts.bias.device, torch.tensor(counts, device=prompts.bias.device)
    before = torch.tensor(done, device=device)
    # The slot of each token, and its index among the new tokens of its slot.
    row = torch.repeat_interleave(torch.arange(rows, device=device), num)  # [T]
    index = torch.arange(len(row), device=device) - torch.repeat_interleave(num.cumsum(0) - num, num)
    places = arena.locate_tokens(first + row, before[row] + index)
    padded = row * most + index  # [T], place of each token in the padded grid [rows * most]
    causal = make_length_bias(before[:, None] + 1 + torch.arange(most, device=device), longest, prompts.bias.dtype)
    bias = torch.cat(
        [
            prompts.bias[:, None].expand(rows, most, prompts.width),
            causal,
        ],
        dim=-1,
    )  # [B, most, W]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, K, g, D], k, v [T, K, D] -> [T, K, g, D]"""
        arena.write(layer, places, k, v)
        _, K, g, D = q.shape
        # Pad to one row per slot, and treat the heads of a KV head and the tokens of a slot alike as its queries.
        grid = q.new_zeros(rows * most, K, g, D).index_copy_(0, padded, q).view(rows, most, K, g, D)
        folded = grid.transpose(1, 2).reshape(rows, K, most * g, D)
        wide = bias[:, :, None].expand(rows, most, g, -1).reshape(rows, 1, most * g, -1)
        own = view_own_kv(arena, layer, first, rows, longest)
        mixed = attend_prompt_and_own(layer, folded, prompts, own, wide)
        flat = mixed.view(rows, K, most, g, D).transpose(1, 2).reshape(rows * most, K, g, D)
        return flat.index_select(0, padded)

    return attend


def make_prefill_attend(batches: list[list[Prefix]]) -> Attend:
    """Returns the attention function for a forward over whole prefixes, whose tokens come flat, prefix after prefix.

    The order is that of the lists. The prefixes of one inner list have places in one pool, where the function stores
    their KV. Attention is causal within each prefix. They are padded on the right to the longest: a causal mask hides
    the padding from every real token, so no other mask is needed.
    """
    steps = []
    begin = 0
    for prefixes in batches:
        pool = prefixes[0].pool
        assert pool is not None
        device, most = pool.arena.device, max(len(p.tokens) for p in prefixes)
        # The prefix of each token, and its position in it.
        num = torch.tensor([len(p.tokens) for p in prefixes], device=device)
        row = torch.repeat_interleave(torch.arange(len(prefixes), device=device), num)
        index = torch.arange(len(row), device=device) - torch.repeat_interleave(num.cumsum(0) - num, num)
        entry = torch.tensor([p.entry for p in prefixes], device=device).index_select(0, row)
        grid = (len(prefixes), most, row * most + index)
        steps.append((pool.arena, slice(begin, begin + len(row)), pool.arena.locate_tokens(entry, index), grid))
        begin += len(row)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, K, g, D], k, v [T, K, D] -> [T, K, g, D]"""
        out = torch.empty_like(q)
        for arena, part, places, grid in steps:
            arena.write(layer, places, k[part], v[part])
            out[part] = _attend_causally(q[part], k[part], v[part], *grid)
        return out

    return attend


def _attend_causally(q: Tensor, k: Tensor, v: Tensor, rows: int, most: int, padded: Tensor) -> Tensor:
    """Returns causal attention within each of `rows` sequences of up to `most` tokens: [T, K, g, D].

    q [T, K, g, D], k, v [T, K, D] hold the tokens of all sequences without padding. Token t has index padded[t] in the
    padded grid [rows * most].
    """
    T, K, g, D = q.shape

    def pad_to_grid(x: Tensor) -> Tensor:
        """[T, K, h, D] -> [rows, K * g, most, D], with h = g or 1 (repeated g times)"""
        full = x if len(x) == rows * most else x.new_zeros(rows * most, *x.shape[1:]).index_copy_(0, padded, x)
        return full.view(rows, most, K, -1, D).expand(-1, -1, -1, g, -1).flatten(2, 3).transpose(1, 2)

    mixed = F.scaled_dot_product_attention(
        pad_to_grid(q), pad_to_grid(k[:, :, None]), pad_to_grid(v[:, :, None]), is_causal=True
    )
    flat = mixed.transpose(1, 2).reshape(rows * most, K, g, D)
    return flat if len(flat) == T else flat.index_select(0, padded)
