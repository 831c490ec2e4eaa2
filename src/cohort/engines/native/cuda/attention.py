"""Triton kernels for decode attention. They read a prompt's KV once per group and a row's own KV once, nothing else.

The queries of a KV head are rows of one small matrix product, whatever their number. Rows that share a prompt form
a tile and read the prompt together. The result is one part of each row's softmax. Another kernel meanwhile
computes the part of each row's own tokens and joins the two. If there are few rows, their keys are split over more
programs, and the parts are joined at the end.

A part of a softmax is: m, the largest score; total, the sum of exp2(score - m); acc, the values summed with the same
weights. Scores are scaled for base 2, because a GPU computes exp2 faster than exp.

Letters: B rows, K KV heads, g query heads per KV head, D head size, M queries per program, padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cohort.engines.native.cuda.rotate import PAGE
from cohort.models.kernels import await_inputs, choose_launch_options, let_next_start, next_power_of_two

LOG2_E = 1.4426950408889634  # log2(e): exp(x) = exp2(x * LOG2_E)


@triton.jit
def _attend_page(q, scale, m, total, acc, key_ptr, value_ptr, start, end, D: tl.constexpr, PAGE: tl.constexpr):
    """Adds one page of keys and values to a partial softmax. Returns the new m, total [M] and acc [M, D].

    m is the largest score so far, total the sum of exp2(score - m), acc the values summed with the same weights. q [M,
    D] are the queries; `scale` turns their products into scores. The page at key_ptr and value_ptr, [PAGE, D] each,
    holds the positions from `start` on; only those below `end` count, which must be at least one.
    """
    n = tl.arange(0, PAGE)
    i = tl.arange(0, D)
    seen = start + n < end
    keys = tl.load(key_ptr + n[None, :] * D + i[:, None], mask=seen[None, :], other=0.0)  # [D, PAGE]
    scores = tl.dot(q, keys, input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    new = tl.maximum(m, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new[:, None])
    # What was summed so far was relative to the old largest score.
    fade = tl.exp2(m - new)
    values = tl.load(value_ptr + n[:, None] * D + i[None, :], mask=seen[:, None], other=0.0)  # [PAGE, D]
    total = total * fade + tl.sum(weights, axis=1)
    acc = acc * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new, total, acc


@triton.jit
def _put_part(m, total, acc, acc_ptr, m_ptr, total_ptr, at, here, D: tl.constexpr):
    """Stores a partial softmax (m, total [M], acc [M, D]) at rows `at` [M] of the three buffers where `here` is set."""
    i = tl.arange(0, D)
    tl.store(acc_ptr + at[:, None] * D + i[None, :], acc, mask=here[:, None])
    tl.store(m_ptr + at, m, mask=here)
    tl.store(total_ptr + at, total, mask=here)


@triton.jit
def _join_part(m, total, acc, acc_ptr, m_ptr, total_ptr, at, here, D: tl.constexpr):
    """Joins a partial softmax with the one stored at rows `at` [M] of the buffers. Returns the new m, total and acc.

    Where `here` is not set, nothing is joined. A part that has seen no key has m = -inf and adds nothing.
    """
    i = tl.arange(0, D)
    m2 = tl.load(m_ptr + at, mask=here, other=float("-inf"))
    total2 = tl.load(total_ptr + at, mask=here, other=0.0)
    acc2 = tl.load(acc_ptr + at[:, None] * D + i[None, :], mask=here[:, None], other=0.0)
    new = tl.maximum(m, m2)
    # If both parts are empty, -inf - (-inf) would be NaN.
    safe = tl.where(new == float("-inf"), 0.0, new)
    fade = tl.exp2(m - safe)
    fade2 = tl.exp2(m2 - safe)
    return new, total * fade + total2 * fade2, acc * fade[:, None] + acc2 * fade2[:, None]


@triton.jit
def _prefix_kernel(
    q_ptr,
    key_pages_ptr,
    value_pages_ptr,
    tile_prefix_ptr,
    tile_rows_ptr,
    table_ptr,
    length_ptr,
    part_acc_ptr,
    part_m_ptr,
    part_total_ptr,
    rows,  # of a part
    table_width,
    scale,
    K: tl.constexpr,
    g: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Computes the partial softmax over a shared prefix: one tile, KV head and split of the keys per program.

    Stores it as part `split` of the rows. M: queries per tile. SPLITS: programs per prefix. EARLY: see `await_inputs`.
    """
    await_inputs(EARLY)
    # `_own_kernel` may start now, not earlier: it reads the queries at once, without waiting.
    let_next_start(EARLY)
    tile = tl.program_id(0)
    k = tl.program_id(1)
    split = tl.program_id(2)
    prefix = tl.load(tile_prefix_ptr + tile)
    # Tiles beyond the last one in use.
    if prefix < 0:
        return
    # Query mi of the tile belongs to row mi // g of the tile and to query head mi % g.
    SIBLINGS: tl.constexpr = M // g
    mi = tl.arange(0, M)
    i = tl.arange(0, D)
    sibling = mi // g
    row = tl.load(tile_rows_ptr + tile * SIBLINGS + sibling, mask=sibling < SIBLINGS, other=-1).to(tl.int64)
    here = row >= 0
    at = (row * K + k) * g + mi % g  # of the query, in [rows * K * g]
    q = tl.load(q_ptr + at[:, None] * D + i[None, :], mask=here[:, None], other=0.0)
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    # Every split reads an equal share of the prefix's pages.
    length = tl.load(length_ptr + prefix)
    pages = (length + PAGE - 1) // PAGE
    each = (pages + SPLITS - 1) // SPLITS
    for p in range(split * each, min(pages, (split + 1) * each)):
        page = tl.load(table_ptr + prefix * table_width + p).to(tl.int64)
        begin = (page * K + k) * PAGE * D
        m, total, acc = _attend_page(
            q, scale, m, total, acc, key_pages_ptr + begin, value_pages_ptr + begin, p * PAGE, length, D, PAGE
        )
    to = split * rows * K * g + at
    _put_part(m, total, acc, part_acc_ptr, part_m_ptr, part_total_ptr, to, here, D)


@triton.jit
def _own_kernel(
    q_ptr,
    key_pages_ptr,
    value_pages_ptr,
    table_ptr,
    count_ptr,
    base_ptr,
    part_acc_ptr,
    part_m_ptr,
    part_total_ptr,
    out_ptr,
    rows,
    table_width,
    scale,
    K: tl.constexpr,
    g: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    PAGE: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Computes the partial softmax over own tokens: one row, KV head and split of the keys per program.

    If SPLITS is 1, joins it with the PREFIX_SPLITS parts of the row's prefix and stores the attention result in
    out_ptr (done rows: 0). Otherwise stores it as a part, for `_join_kernel`. M: g, padded. EARLY: see `await_inputs`.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    split = tl.program_id(2)
    mi = tl.arange(0, M)
    i = tl.arange(0, D)
    here = mi < g
    at = (row * K + k) * g + mi
    count = tl.load(count_ptr + row)
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    q = tl.load(q_ptr + at[:, None] * D + i[None, :], mask=here[:, None], other=0.0)
    pages = (count + PAGE - 1) // PAGE
    each = (pages + SPLITS - 1) // SPLITS
    for p in range(split * each, min(pages, (split + 1) * each)):
        page = tl.load(table_ptr + row * table_width + p).to(tl.int64)
        begin = (page * K + k) * PAGE * D
        m, total, acc = _attend_page(
            q, scale, m, total, acc, key_pages_ptr + begin, value_pages_ptr + begin, p * PAGE, count, D, PAGE
        )
    await_inputs(EARLY)  # only now are the parts of `_prefix_kernel` needed
    if SPLITS == 1:
        # For rows without a prefix the buffers hold old parts, and rows that are done need no result.
        ready = here & (tl.load(base_ptr + row) > 0) & (count > 0)
        for s in tl.static_range(PREFIX_SPLITS):
            part = s * rows * K * g + at
            m, total, acc = _join_part(m, total, acc, part_acc_ptr, part_m_ptr, part_total_ptr, part, ready, D)
        mixed = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + at[:, None] * D + i[None, :], mixed.to(out_ptr.dtype.element_ty), mask=here[:, None])
    else:
        to = (PREFIX_SPLITS + split) * rows * K * g + at
        _put_part(m, total, acc, part_acc_ptr, part_m_ptr, part_total_ptr, to, here, D)


@triton.jit
def _join_kernel(
    count_ptr,
    base_ptr,
    part_acc_ptr,
    part_m_ptr,
    part_total_ptr,
    out_ptr,
    rows,
    K: tl.constexpr,
    g: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Joins all partial softmaxes of one row and KV head per program, and stores the attention result in out_ptr.

    The first PREFIX_SPLITS parts are over the row's prefix, the next SPLITS over its own tokens. Rows that are done get
    0. M: g, the query heads per KV head, padded.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    mi = tl.arange(0, M)
    i = tl.arange(0, D)
    here = mi < g
    at = (row * K + k) * g + mi
    running = tl.load(count_ptr + row) > 0
    has_prefix = tl.load(base_ptr + row) > 0
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for s in tl.static_range(PREFIX_SPLITS + SPLITS):
        ready = here & running
        if s < PREFIX_SPLITS:
            ready = ready & has_prefix
        part = s * rows * K * g + at
        m, total, acc = _join_part(m, total, acc, part_acc_ptr, part_m_ptr, part_total_ptr, part, ready, D)
    mixed = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + at[:, None] * D + i[None, :], mixed.to(out_ptr.dtype.element_ty), mask=here[:, None])


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """What the rows of a step read. A tile is one prefix and up to M // g of its rows, which read it together."""

    tile_prefix: Tensor  # [tiles] int32, entry of the prefix; -1 = unused tile
    tile_rows: Tensor  # [tiles, M // g] int32, rows of the tile; -1 = none
    prefix_table: Tensor  # [prefixes, width] int32, pages
    prefix_length: Tensor  # [prefixes] int32, in tokens
    own_table: Tensor  # [rows, width] int32, pages
    base: Tensor  # [rows] int64, length of the row's prefix
    count: Tensor  # [rows] int32, own tokens to be read, 0 = the row is done
    M: int  # queries per tile
    prefix_splits: int  # programs that share the keys of a prefix
    splits: int  # programs that share the own keys of a row


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxParts:
    """Buffers for parts of softmaxes, in fp32. The module's docstring explains the three fields."""

    acc: Tensor  # [parts, rows, K, g, D]
    m: Tensor  # [parts, rows, K, g]
    total: Tensor  # [parts, rows, K, g]

    @staticmethod
    def allocate(parts: int, rows: int, K: int, g: int, D: int, device: torch.device) -> SoftmaxParts:
        """Returns zeroed buffers for `parts` partial softmaxes per row and query.

        A row has K KV heads with g query heads each; D is the size of a head.
        """
        shape = (parts, rows, K, g)
        acc = torch.zeros(*shape, D, device=device)
        return SoftmaxParts(acc=acc, m=torch.zeros(shape, device=device), total=torch.zeros(shape, device=device))


def compute_decode_attention(
    q: Tensor, pages: tuple[Tensor, Tensor], plan: AttentionPlan, parts: SoftmaxParts
) -> Tensor:
    """Returns attention of rotated queries [B, K, g, D] over each row's prefix and own tokens: [B, K * g * D].

    `pages` is keys and values of the layer, [pages, K, PAGE, D] each; those of the new tokens must be stored already.
    `plan` says which pages a row reads. `parts` are buffers for intermediate results, which are overwritten. Rows that
    are done get 0.
    """
    B, K, g, D = q.shape
    r, out = plan, q.new_empty(B, K * g * D)
    scale = D**-0.5 * LOG2_E
    buffers = (parts.acc, parts.m, parts.total)
    width = r.own_table.shape[1]
    # Pages in shared memory at once: three, if they are small enough.
    stages = 3 if D * q.element_size() <= 256 else 2
    launch_options = choose_launch_options(q.device)
    _prefix_kernel[(len(r.tile_prefix), K, r.prefix_splits)](
        *(q, *pages, r.tile_prefix, r.tile_rows, r.prefix_table, r.prefix_length, *buffers),
        *(B, r.prefix_table.shape[1], scale, K, g, D, r.M, PAGE, r.prefix_splits),
        num_warps=4,
        num_stages=2,
        **launch_options,
    )
    # A matrix unit takes at least 16 rows.
    M = max(16, next_power_of_two(g))
    _own_kernel[(B, K, r.splits)](
        *(q, *pages, r.own_table, r.count, r.base, *buffers, out),
        *(B, width, scale, K, g, D, M, PAGE, r.prefix_splits, r.splits),
        num_warps=1 if D <= 64 else 2,
        num_stages=stages,
        **launch_options,
    )
    if r.splits > 1:
        _join_kernel[(B, K)](r.count, r.base, *buffers, out, B, K, g, D, M, r.prefix_splits, r.splits, num_warps=4)
    return out
