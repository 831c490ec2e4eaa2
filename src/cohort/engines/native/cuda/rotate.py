"""The Triton kernel between the first product of a layer and its attention: it rotates, and stores keys and values.

It rounds where the decoder's own operations round, so that sampler and learner differ as little as possible.

Letters: T tokens, K KV heads, g query heads per KV head, D head size. KV lies in pages of PAGE tokens: keys and values
of a layer are [pages, K, PAGE, D] each. Page 0 belongs to no request: rows that are done write there.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from cohort.models.kernels import await_inputs, choose_launch_options, let_next_start, next_power_of_two

PAGE = 64  # tokens per page


@triton.jit
def _norm_heads(a, b, q_norm_ptr, k_norm_ptr, eps, is_q, i, half: tl.constexpr, dtype: tl.constexpr):
    """Returns the RMS norm of heads that come as halves a, b [heads, half], again as two halves.

    `is_q` [heads, 1] says which heads get the norm weight of queries; the others get that of keys. `i` is 0 .. half -
    1. Results are rounded to `dtype` and returned as fp32.
    """
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
    """Rotates the g query heads and the key of one token and KV head per program, and stores key and value in a page.

    Rotated queries go to q_ptr [T, K, g, D]. HEADS: g + 1, padded to a power of two. NORM: queries and keys are normed
    first. KEEP: rotated keys are also stored to k_ptr [T, K, D]. EARLY: see `await_inputs`.
    """
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    half: tl.constexpr = D // 2
    h = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, half)
    # Position, place and angles are read before the wait: the kernel launched just before does not write them.
    position = tl.load(position_ptr + t)
    place = tl.load(place_ptr + t)
    cos = tl.load(cos_ptr + position * half + i).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position * half + i).to(tl.float32)[None, :]
    await_inputs(EARLY)
    let_next_start(EARLY)
    # Heads 0 .. g - 1 are queries, head g is the key, head g + 1 the value.
    start = (t * K + k) * (g + 2) * D
    from_ptr = qkv_ptr + start + h * D + i[None, :]
    low = tl.load(from_ptr, mask=h < g + 1, other=0.0)
    dtype: tl.constexpr = low.dtype
    a = low.to(tl.float32)
    b = tl.load(from_ptr + half, mask=h < g + 1, other=0.0).to(tl.float32)
    if NORM:
        a, b = _norm_heads(a, b, q_norm_ptr, k_norm_ptr, eps, h < g, i, half, dtype)
    # The product with the cosine is rounded on its own, as in the decoder.
    turned_a = ((a * cos).to(dtype).to(tl.float32) - b * sin).to(dtype)
    turned_b = ((b * cos).to(dtype).to(tl.float32) + a * sin).to(dtype)
    to_q = q_ptr + ((t * K + k) * g + h) * D + i[None, :]
    tl.store(to_q, turned_a, mask=h < g)
    tl.store(to_q + half, turned_b, mask=h < g)
    # Row of this token and KV head in pages seen as [pages * K * PAGE, D]. `h * 0` only gives the shape [HEADS, half].
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
    """Cosine and sine of the rotation at every position, [positions, D / 2], rounded to the model's type."""

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
    """Rotates queries and keys of qkv [T, K, g + 2, D] by their positions and stores keys and values in pages.

    Returns the rotated queries [T, K, g, D] and, with `keep`, the rotated keys [T, K, D] (else an empty tensor); qkv
    does not change. `positions` [T] are in the sequence, `places` [T] are page * PAGE + offset in the page. `norms` is
    (query norm, key norm, eps) for models with qk-norm, applied before the rotation, else None. `pages` is keys and
    values of the layer. The kernel launched just before may write qkv, but not positions, places and angles: these are
    read early.
    """
    T, K, heads, D = qkv.shape
    g = heads - 2
    q = qkv.new_empty(T, K, g, D)
    k = qkv.new_empty((T, K, D) if keep else (0,))
    q_norm, k_norm, eps = norms if norms is not None else (qkv, qkv, 0.0)
    # A grid without programs cannot be launched.
    if T:
        _rotate_kernel[(T, K)](
            *(qkv, positions, places, angles.cos, angles.sin, q_norm, k_norm, q, k, *pages, eps),
            *(K, g, D, next_power_of_two(g + 1), PAGE, norms is not None, keep),
            num_warps=1 if g <= 8 else 2,
            **choose_launch_options(qkv.device),
        )
    return q, k
