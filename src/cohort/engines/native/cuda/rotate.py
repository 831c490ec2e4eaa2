"""The Triton kernel between the first product of a layer and its attention: rotate, and store keys and values.

Rounding happens where the decoder's own operations round, so that sampler and learner differ as little as they can.

Letters: T tokens, K KV heads, g query heads a KV head, D head size. KV lies in pages of PAGE tokens,
[pages, K, PAGE, D] a layer and half; page 0 belongs to nobody: rows that are done write there.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from cohort.models.kernels import await_inputs, early, let_next_start, power

PAGE = 64


@triton.jit
def _norm_heads(a, b, q_norm_ptr, k_norm_ptr, eps, is_q, i, half: tl.constexpr, dtype: tl.constexpr):
    """RMS norm of heads that come as halves a, b [heads, half], with one weight for queries and one for keys."""
    scale = 1.0 / tl.sqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * half) + eps)[:, None]
    low = tl.where(is_q, tl.load(q_norm_ptr + i)[None, :], tl.load(k_norm_ptr + i)[None, :])
    high = tl.where(is_q, tl.load(q_norm_ptr + half + i)[None, :], tl.load(k_norm_ptr + half + i)[None, :])
    a = (a * scale).to(dtype).to(tl.float32) * low.to(tl.float32)
    b = (b * scale).to(dtype).to(tl.float32) * high.to(tl.float32)
    return a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)


@triton.jit
def _rotate_kernel(
    qkv_ptr, position_ptr, place_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, q_ptr, k_ptr, key_pages_ptr,
    value_pages_ptr, eps, K: tl.constexpr, g: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    PAGE: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    half: tl.constexpr = D // 2
    h = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, half)
    position = tl.load(position_ptr + t)  # these were written long ago
    place = tl.load(place_ptr + t)
    cos = tl.load(cos_ptr + position * half + i).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position * half + i).to(tl.float32)[None, :]
    await_inputs(EARLY)
    let_next_start(EARLY)
    start = (t * K + k) * (g + 2) * D
    from_ptr = qkv_ptr + start + h * D + i[None, :]
    low = tl.load(from_ptr, mask=h < g + 1, other=0.0)
    dtype: tl.constexpr = low.dtype
    a = low.to(tl.float32)
    b = tl.load(from_ptr + half, mask=h < g + 1, other=0.0).to(tl.float32)
    if NORM:
        a, b = _norm_heads(a, b, q_norm_ptr, k_norm_ptr, eps, h < g, i, half, dtype)
    turned_a = ((a * cos).to(dtype).to(tl.float32) - b * sin).to(dtype)
    turned_b = ((b * cos).to(dtype).to(tl.float32) + a * sin).to(dtype)
    to_q = q_ptr + ((t * K + k) * g + h) * D + i[None, :]
    tl.store(to_q, turned_a, mask=h < g)
    tl.store(to_q + half, turned_b, mask=h < g)
    slot = ((place // PAGE) * K + k) * PAGE + place % PAGE
    to_k = key_pages_ptr + slot * D + h * 0 + i[None, :]
    tl.store(to_k, turned_a, mask=h == g)
    tl.store(to_k + half, turned_b, mask=h == g)
    if KEEP:
        kept = k_ptr + (t * K + k) * D + h * 0 + i[None, :]
        tl.store(kept, turned_a, mask=h == g)
        tl.store(kept + half, turned_b, mask=h == g)
    full = tl.arange(0, D)
    tl.store(value_pages_ptr + slot * D + full, tl.load(qkv_ptr + start + (g + 1) * D + full))


@dataclass(frozen=True, kw_only=True, slots=True)
class Angles:
    """cos and sin of every position, [positions, D / 2], rounded to the model's type as the decoder rounds them."""

    cos: Tensor
    sin: Tensor


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    places: Tensor,
    angles: Angles,
    norms: tuple[Tensor, Tensor, float] | None,
    pages: tuple[Tensor, Tensor],
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys of qkv [T, K, g + 2, D] (normed first, for qk-norm), store keys and values in pages.

    places [T] = page * PAGE + offset. Returns q [T, K, g, D] and, with `keep`, the keys [T, K, D] once more.
    What was launched just before may write qkv, but not positions, places and angles: they are read early.
    """
    T, K, heads, D = qkv.shape
    g = heads - 2
    q = qkv.new_empty(T, K, g, D)
    k = qkv.new_empty((T, K, D) if keep else (0,))
    q_norm, k_norm, eps = norms if norms is not None else (qkv, qkv, 0.0)
    if T:
        _rotate_kernel[(T, K)](
            *(qkv, positions, places, angles.cos, angles.sin, q_norm, k_norm, q, k, *pages, eps),
            *(K, g, D, power(g + 1), PAGE, norms is not None, keep),
            num_warps=1 if g <= 8 else 2,
            **early(qkv.device),
        )
    return q, k
