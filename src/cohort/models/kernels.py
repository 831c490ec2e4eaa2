"""Triton kernels for the elementwise work of a layer, forward and backward, each behind a function of tensors.

Forward they round where the decoder's plain operations round, so that sampler and learner differ as little as they
can. Nothing here waits for the host, and nothing is added up in an order that changes from run to run.

Letters: T tokens, d hidden, K KV heads, g query heads a KV head, D head size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 1024  # programs that each add up a part of a norm's gradient


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Options of a kernel that may start before the one before it has ended: it must call `await_inputs`."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """Everything launched before is through from here on. In every program, or what comes after may start too soon."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """The kernel launched next may start once all programs have come here; to read what this one writes, it waits."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


# ---- norm


@triton.jit
def _add_norm_kernel(
    x_ptr, y_ptr, weight_ptr, total_ptr, out_ptr, scale_ptr, eps, d: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    here = at < d
    weight = tl.load(weight_ptr + at, mask=here, other=0.0).to(tl.float32)
    if ADD:
        x = tl.load(x_ptr + row * d + at, mask=here, other=0.0).to(tl.float32)  # settled before y was begun
        await_inputs(EARLY)
        x = x + tl.load(y_ptr + row * d + at, mask=here, other=0.0).to(tl.float32)
        x = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * d + at, x, mask=here)
        x = x.to(tl.float32)
    else:
        await_inputs(EARLY)
        x = tl.load(x_ptr + row * d + at, mask=here, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / d + eps)
    normed = (x * scale).to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * d + at, normed.to(dtype), mask=here)
    if KEEP:
        tl.store(scale_ptr + row, scale)


def add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, total: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """The RMS norm of x + y (or of x) in the weight's type. [T, d] each; the sum goes to `total`, or over x.

    `scale` [T] takes the factors 1 / rms, for the backward. What was launched just before may write y, or x where
    there is no y, but not the others: they are read early.
    """
    T, d = x.shape
    assert x.is_contiguous() and (y is None or y.is_contiguous())
    out = torch.empty(T, d, dtype=weight.dtype, device=x.device)
    if T:
        block = power(d)
        _add_norm_kernel[(T,)](
            *(x, x if y is None else y, weight, x if total is None else total, out, x if scale is None else scale),
            *(eps, d, block, y is not None, scale is not None),
            num_warps=min(8, max(1, block // 256)),
            **early(x.device),
        )
    return out


@triton.jit(do_not_specialize=["T", "each"])
def _norm_backward_kernel(
    x_ptr, weight_ptr, scale_ptr, d_out_ptr, d_total_ptr, d_x_ptr, d_y_ptr, d_weight_ptr, T, each,
    d: tl.constexpr, BLOCK: tl.constexpr, TOTAL: tl.constexpr, Y: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    here = at < d
    weight = tl.load(weight_ptr + at, mask=here, other=0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], tl.float32)
    for n in range(program * each, min(T, (program + 1) * each)):
        row = tl.cast(n, tl.int64)
        scale = tl.load(scale_ptr + row)
        normed = tl.load(x_ptr + row * d + at, mask=here, other=0.0).to(tl.float32) * scale
        d_out = tl.load(d_out_ptr + row * d + at, mask=here, other=0.0).to(tl.float32)
        d_weight += d_out * normed
        inner = d_out * weight
        along = tl.sum(inner * normed, axis=0) / d
        d_x = (inner - normed * along) * scale
        if TOTAL:
            d_x += tl.load(d_total_ptr + row * d + at, mask=here, other=0.0).to(tl.float32)
        tl.store(d_x_ptr + row * d + at, d_x.to(d_x_ptr.dtype.element_ty), mask=here)
        if Y:
            tl.store(d_y_ptr + row * d + at, d_x.to(d_y_ptr.dtype.element_ty), mask=here)
    tl.store(d_weight_ptr + program * d + at, d_weight, mask=here)


def norm_backward(
    x: Tensor, weight: Tensor, scale: Tensor, d_out: Tensor, d_total: Tensor | None, y_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Of `add_norm`: x is the sum that was normed, d_total what reaches it from elsewhere.

    Returns the gradients of x, of y in its own type (None without one) and of the weight [d].
    """
    T, d = x.shape
    assert x.is_contiguous() and d_out.is_contiguous() and (d_total is None or d_total.is_contiguous())
    d_x = torch.empty_like(x)
    d_y = None if y_dtype is None else torch.empty(T, d, dtype=y_dtype, device=x.device)
    each = max(1, -(-T // (PARTS * max(1, 1024 // power(d)))))  # short rows are many: heads, say
    programs = -(-T // each)
    parts = torch.empty(programs, d, dtype=torch.float32, device=x.device)
    if T:
        block = power(d)
        _norm_backward_kernel[(programs,)](
            *(x, weight, scale, d_out, d_x if d_total is None else d_total, d_x, d_x if d_y is None else d_y, parts),
            *(T, each, d, block, d_total is not None, d_y is not None),
            num_warps=min(8, max(1, block // 256)),
        )
    return d_x, d_y, parts.sum(0).to(weight.dtype)


# ---- gated unit


@triton.jit
def _gate_kernel(wide_ptr, out_ptr, ff: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < ff
    gate = tl.load(wide_ptr + row * 2 * ff + at, mask=here, other=0.0)
    up = tl.load(wide_ptr + row * 2 * ff + ff + at, mask=here, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * ff + at, (opened * up.to(tl.float32)).to(dtype), mask=here)


def gate(wide: Tensor) -> Tensor:
    """silu(gate) * up of [T, gate | up]."""
    T, ff = wide.shape[0], wide.shape[1] // 2
    assert wide.is_contiguous()
    out = wide.new_empty(T, ff)
    if T:
        block = min(1024, power(ff))
        _gate_kernel[(T, triton.cdiv(ff, block))](wide, out, ff, block, num_warps=4, **early(wide.device))
    return out


@triton.jit
def _gate_backward_kernel(wide_ptr, d_out_ptr, d_wide_ptr, out_ptr, ff: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < ff
    gate = tl.load(wide_ptr + row * 2 * ff + at, mask=here, other=0.0)
    up = tl.load(wide_ptr + row * 2 * ff + ff + at, mask=here, other=0.0).to(tl.float32)
    d_out = tl.load(d_out_ptr + row * ff + at, mask=here, other=0.0).to(tl.float32)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    opened = (gate * sigmoid).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * ff + at, (opened * up).to(dtype), mask=here)
    d_gate = d_out * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(d_wide_ptr + row * 2 * ff + at, d_gate.to(dtype), mask=here)
    tl.store(d_wide_ptr + row * 2 * ff + ff + at, (d_out * opened).to(dtype), mask=here)


def gate_backward(wide: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient [T, gate | up] of `gate`, and what `gate` gave once more [T, ff]: nobody had to keep it."""
    T, ff = d_out.shape
    assert wide.is_contiguous() and d_out.is_contiguous()
    d_wide, out = torch.empty_like(wide), torch.empty_like(d_out)
    if T:
        block = min(1024, power(ff))
        _gate_backward_kernel[(T, triton.cdiv(ff, block))](wide, d_out, d_wide, out, ff, block, num_warps=4)
    return d_wide, out


# ---- rotation


@triton.jit
def _rotate_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, K: tl.constexpr, g: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """From qkv to q, k, v, or BACK: from their gradients to that of qkv, by the inverse rotation."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    half: tl.constexpr = D // 2
    h = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, half)
    cos = tl.load(cos_ptr + t * half + i).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + t * half + i).to(tl.float32)[None, :]
    fused = qkv_ptr + (t * K + k) * (g + 2) * D
    to_q = q_ptr + ((t * K + k) * g + h) * D + i[None, :]
    to_k = k_ptr + (t * K + k) * D + h * 0 + i[None, :]
    of_qkv = fused + h * D + i[None, :]
    full = tl.arange(0, D)
    to_v = v_ptr + (t * K + k) * D + full
    is_q = h < g
    is_k = h == g
    if BACK:
        low = tl.load(to_q, mask=is_q, other=0.0) + tl.load(to_k, mask=is_k, other=0.0)
        high = tl.load(to_q + half, mask=is_q, other=0.0) + tl.load(to_k + half, mask=is_k, other=0.0)
        sin = -sin
    else:
        low = tl.load(of_qkv, mask=h < g + 1, other=0.0)
        high = tl.load(of_qkv + half, mask=h < g + 1, other=0.0)
    dtype: tl.constexpr = low.dtype
    a = low.to(tl.float32)
    b = high.to(tl.float32)
    turned_a = ((a * cos).to(dtype).to(tl.float32) - b * sin).to(dtype)
    turned_b = ((b * cos).to(dtype).to(tl.float32) + a * sin).to(dtype)
    if BACK:
        tl.store(of_qkv, turned_a, mask=h < g + 1)
        tl.store(of_qkv + half, turned_b, mask=h < g + 1)
        tl.store(fused + (g + 1) * D + full, tl.load(to_v))
    else:
        tl.store(to_q, turned_a, mask=is_q)
        tl.store(to_q + half, turned_b, mask=is_q)
        tl.store(to_k, turned_a, mask=is_k)
        tl.store(to_k + half, turned_b, mask=is_k)
        tl.store(to_v, tl.load(fused + (g + 1) * D + full))


def split_rotated(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, K, g + 2, D], cos and sin [T, D / 2] -> q [T, K, g, D] and k [T, K, D], rotated, and v [T, K, D]."""
    T, K, heads, D = qkv.shape
    assert qkv.is_contiguous()
    q, k, v = qkv.new_empty(T, K, heads - 2, D), qkv.new_empty(T, K, D), qkv.new_empty(T, K, D)
    if T:
        g = heads - 2
        _rotate_kernel[(T, K)](qkv, cos, sin, q, k, v, K, g, D, power(g + 1), False, num_warps=1 if g <= 8 else 2)
    return q, k, v


def split_rotated_backward(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of qkv [T, K, g + 2, D], from contiguous ones of q, k and v."""
    T, K, g, D = d_q.shape
    d_qkv = d_q.new_empty(T, K, g + 2, D)
    if T:
        warps = 1 if g <= 8 else 2
        _rotate_kernel[(T, K)](d_qkv, cos, sin, d_q, d_k, d_v, K, g, D, power(g + 1), True, num_warps=warps)
    return d_qkv
