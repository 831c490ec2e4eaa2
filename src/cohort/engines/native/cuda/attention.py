"""Triton kernels for decode attention: a prompt's KV is read once a group, a row's own KV once, nothing else at all.

The queries of a KV head are rows of one small matrix product, whatever their number. Rows that share a prompt meet
it together (a tile); what that gives is part of a softmax, and each row joins it to the part of its own tokens, which
are read meanwhile. Few rows split their keys over more programs and join the parts.

Letters: B rows, K KV heads, g query heads a KV head, D head size, M queries of a program, padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cohort.engines.native.cuda.rotate import PAGE
from cohort.models.kernels import await_inputs, early, let_next_start, power

LOG2_E = 1.4426950408889634


@triton.jit
def _attend_page(q, scale, m, total, acc, key_ptr, value_ptr, start, end, D: tl.constexpr, PAGE: tl.constexpr):
    """One page more of an online softmax, m, total [M], acc [M, D]. Positions from `start` on; those < `end` count."""
    n = tl.arange(0, PAGE)
    i = tl.arange(0, D)
    seen = start + n < end
    keys = tl.load(key_ptr + n[None, :] * D + i[:, None], mask=seen[None, :], other=0.0)  # [D, PAGE]
    scores = tl.dot(q, keys, input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, float("-inf"))
    new = tl.maximum(m, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new[:, None])
    fade = tl.exp2(m - new)
    values = tl.load(value_ptr + n[:, None] * D + i[None, :], mask=seen[:, None], other=0.0)  # [PAGE, D]
    total = total * fade + tl.sum(weights, axis=1)
    acc = acc * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new, total, acc


@triton.jit
def _put_part(m, total, acc, acc_ptr, m_ptr, total_ptr, at, here, D: tl.constexpr):
    """A part of a softmax, for somebody else to join."""
    i = tl.arange(0, D)
    tl.store(acc_ptr + at[:, None] * D + i[None, :], acc, mask=here[:, None])
    tl.store(m_ptr + at, m, mask=here)
    tl.store(total_ptr + at, total, mask=here)


@triton.jit
def _join_part(m, total, acc, acc_ptr, m_ptr, total_ptr, at, here, D: tl.constexpr):
    """One part more of a softmax. A part that saw nothing has m = -inf and counts nothing."""
    i = tl.arange(0, D)
    m2 = tl.load(m_ptr + at, mask=here, other=float("-inf"))
    total2 = tl.load(total_ptr + at, mask=here, other=0.0)
    acc2 = tl.load(acc_ptr + at[:, None] * D + i[None, :], mask=here[:, None], other=0.0)
    new = tl.maximum(m, m2)
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
    await_inputs(EARLY)
    let_next_start(EARLY)  # to the rows' own tokens, not before the queries are there: it reads them at once
    tile = tl.program_id(0)
    k = tl.program_id(1)
    split = tl.program_id(2)
    prefix = tl.load(tile_prefix_ptr + tile)
    if prefix < 0:
        return
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
    await_inputs(EARLY)
    if SPLITS == 1:
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
class Reading:
    """What the rows of a step read. A tile is one prefix and up to M // g of its rows: they meet it at once."""

    tile_prefix: Tensor  # [tiles] int32, -1 = none
    tile_rows: Tensor  # [tiles, M // g] int32, -1 = none
    prefix_table: Tensor  # [prefixes, width] int32, pages
    prefix_length: Tensor  # [prefixes] int32
    own_table: Tensor  # [rows, width] int32
    base: Tensor  # [rows] int64, length of the row's prefix
    count: Tensor  # [rows] int32, own tokens to be read, 0 = the row is done
    M: int  # queries a tile
    prefix_splits: int
    splits: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Room for the parts of split softmaxes, fp32."""

    acc: Tensor  # [parts, rows, K, g, D]
    m: Tensor  # [parts, rows, K, g]
    total: Tensor

    @staticmethod
    def make(parts: int, rows: int, K: int, g: int, D: int, device: torch.device) -> Parts:
        shape = (parts, rows, K, g)
        acc = torch.zeros(*shape, D, device=device)
        return Parts(acc=acc, m=torch.zeros(shape, device=device), total=torch.zeros(shape, device=device))


def decode_attention(q: Tensor, pages: tuple[Tensor, Tensor], reading: Reading, parts: Parts) -> Tensor:
    """q [B, K, g, D] over each row's prefix and own tokens -> [B, K * g * D]. Reads only what is live."""
    B, K, g, D = q.shape
    r, out = reading, q.new_empty(B, K * g * D)
    scale = D**-0.5 * LOG2_E
    here = (parts.acc, parts.m, parts.total)
    width = r.own_table.shape[1]
    stages = 3 if D * q.element_size() <= 256 else 2  # pages in shared memory at once
    soon = early(q.device)
    _prefix_kernel[(len(r.tile_prefix), K, r.prefix_splits)](
        *(q, *pages, r.tile_prefix, r.tile_rows, r.prefix_table, r.prefix_length, *here),
        *(B, r.prefix_table.shape[1], scale, K, g, D, r.M, PAGE, r.prefix_splits),
        num_warps=4,
        num_stages=2,
        **soon,
    )
    M = max(16, power(g))
    _own_kernel[(B, K, r.splits)](
        *(q, *pages, r.own_table, r.count, r.base, *here, out),
        *(B, width, scale, K, g, D, M, PAGE, r.prefix_splits, r.splits),
        num_warps=1 if D <= 64 else 2,
        num_stages=stages,
        **soon,
    )
    if r.splits > 1:
        _join_kernel[(B, K)](r.count, r.base, *here, out, B, K, g, D, M, r.prefix_splits, r.splits, num_warps=4)
    return out
