"""Triton kernels for the elementwise work of a layer, forward and backward, each with a function that launches it.

In the forward pass they round where the decoder's plain operations round, so that sampler and learner differ as little
as possible. Nothing here makes the host wait for the GPU, and no sum has an order that changes from run to run.

In kernels, `at` are the columns that a program works on, and `here` masks those beyond the end of the row.

Letters: T tokens, d hidden size, ff size of the feed-forward part, K KV heads, g query heads per KV head, D head size.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# About how many programs add up partial sums of the gradient of a norm's weight.
MAX_PARTS = 1024


def next_power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least n. n must be at least 1."""
    return 1 << (n - 1).bit_length()


@cache
def choose_launch_options(device: torch.device) -> dict[str, Any]:
    """Returns the keyword arguments to launch a kernel with so that it starts before the kernel before it has ended.

    They are EARLY=True and Triton's option launch_pdl, or only EARLY=False where the device cannot do this. The kernel
    must pass EARLY to `await_inputs` before it reads what earlier kernels write. The dict is made once per device and
    must not be changed.
    """
    # Programmatic dependent launch exists from compute capability 9.0 on.
    has_early_start = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if has_early_start else {"EARLY": False}


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """Waits until all kernels that were launched before this one have finished. Does nothing unless EARLY.

    EARLY: this kernel was launched with the option to start early. Then every program of it must make this call,
    because otherwise later kernels could start too soon.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Allows the kernel launched next to start once all programs of this kernel have made this call or ended.

    Only a kernel that was launched with the option to start early does so, and it must still call `await_inputs` before
    it reads what this kernel writes. Does nothing unless EARLY, which means that the device can start kernels early.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


# ---- norm


@triton.jit
def _add_norm_kernel(
    x_ptr, y_ptr, weight_ptr, total_ptr, out_ptr, scale_ptr, eps, d: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Computes one row of `add_norm` per program: stores x + y in total, and its RMS norm times weight in out.

    ADD: there is a y; otherwise it computes the norm of x, and y and total are not used. KEEP: stores 1 / rms in scale.
    d: length of a row. BLOCK: the next power of two. EARLY: see `await_inputs`.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    here = at < d
    weight = tl.load(weight_ptr + at, mask=here, other=0.0).to(tl.float32)
    if ADD:
        # x is read before the wait: it was complete before the kernel that writes y was launched.
        x = tl.load(x_ptr + row * d + at, mask=here, other=0.0).to(tl.float32)
        await_inputs(EARLY)
        x = x + tl.load(y_ptr + row * d + at, mask=here, other=0.0).to(tl.float32)
        # The norm is that of the rounded sum, as it is stored.
        x = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * d + at, x, mask=here)
        x = x.to(tl.float32)
    else:
        await_inputs(EARLY)
        x = tl.load(x_ptr + row * d + at, mask=here, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / d + eps)
    # Rounded before the multiplication with the weight, as the plain operations do.
    normed = (x * scale).to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * d + at, normed.to(dtype), mask=here)
    if KEEP:
        tl.store(scale_ptr + row, scale)


def add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, total: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Returns the RMS norm of x + y (of x, if y is None) times weight [d], as a new tensor in the weight's type.

    x, y, `total` and the result are [T, d]; x and y must be contiguous. With a y, the sum is written into `total`, or
    over x if that is None. `scale` [T], if given, receives 1 / rms; `eps` is added to the mean square. The kernel
    launched just before may write y (or x, if there is no y). It must not write the other inputs, because they are read
    before that kernel has ended.
    """
    T, d = x.shape
    assert x.is_contiguous() and (y is None or y.is_contiguous())
    out = torch.empty(T, d, dtype=weight.dtype, device=x.device)
    if T:
        block = next_power_of_two(d)
        _add_norm_kernel[(T,)](
            # A kernel takes no None: x stands in for a tensor that is not given and not read or written.
            *(x, x if y is None else y, weight, x if total is None else total, out, x if scale is None else scale),
            *(eps, d, block, y is not None, scale is not None),
            num_warps=min(8, max(1, block // 256)),
            **choose_launch_options(x.device),
        )
    return out


@triton.jit(do_not_specialize=["T", "each"])
def _norm_backward_kernel(
    x_ptr, weight_ptr, scale_ptr, d_out_ptr, d_total_ptr, d_x_ptr, d_y_ptr, d_weight_ptr, T, each,
    d: tl.constexpr, BLOCK: tl.constexpr, TOTAL: tl.constexpr, Y: tl.constexpr,
):  # fmt: skip
    """Computes `norm_backward` for `each` consecutive rows of T per program: stores their gradients in d_x.

    Stores the program's part of the weight's gradient, summed over its rows, in one row of d_weight. TOTAL: d_total is
    added to d_x. Y: d_x is also stored in d_y, in the type of y. d: length of a row. BLOCK: the next power of two.
    """
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
    """Returns the gradients of the inputs of `add_norm`: of x [T, d], of y [T, d], and of the weight [d].

    `x` is the sum that was normed, `scale` [T] the factors 1 / rms, `d_out` the gradient of the norm, and `d_total` the
    gradient that the sum has from its other uses (None: it has none). x, `d_out` and `d_total` must be contiguous. The
    gradient of y equals that of x, in the type `y_dtype`; if that is None, there was no y, and its gradient is None.
    """
    T, d = x.shape
    assert x.is_contiguous() and d_out.is_contiguous() and (d_total is None or d_total.is_contiguous())
    d_x = torch.empty_like(x)
    d_y = None if y_dtype is None else torch.empty(T, d, dtype=y_dtype, device=x.device)
    # Rows per program. Short rows, such as those of heads, are many and get more programs.
    each = max(1, -(-T // (MAX_PARTS * max(1, 1024 // next_power_of_two(d)))))
    programs = -(-T // each)
    # One partial sum per program, summed below in a fixed order. Atomic additions would have none.
    parts = torch.empty(programs, d, dtype=torch.float32, device=x.device)
    if T:
        block = next_power_of_two(d)
        _norm_backward_kernel[(programs,)](
            *(x, weight, scale, d_out, d_x if d_total is None else d_total, d_x, d_x if d_y is None else d_y, parts),
            *(T, each, d, block, d_total is not None, d_y is not None),
            num_warps=min(8, max(1, block // 256)),
        )
    return d_x, d_y, parts.sum(0).to(weight.dtype)


# ---- gated unit


@triton.jit
def _gate_kernel(wide_ptr, out_ptr, ff: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Stores silu(gate) * up in out [T, ff], one row and BLOCK columns per program.

    wide [T, 2 ff] has gate and up side by side. EARLY: see `await_inputs`.
    """
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < ff
    gate = tl.load(wide_ptr + row * 2 * ff + at, mask=here, other=0.0)
    up = tl.load(wide_ptr + row * 2 * ff + ff + at, mask=here, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    # Rounded after silu, as the plain operations do.
    opened = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * ff + at, (opened * up.to(tl.float32)).to(dtype), mask=here)


def apply_gate(wide: Tensor) -> Tensor:
    """Returns silu(gate) * up [T, ff], for `wide` = gate and up side by side [T, 2 ff]."""
    T, ff = wide.shape[0], wide.shape[1] // 2
    assert wide.is_contiguous()
    out = wide.new_empty(T, ff)
    if T:
        block = min(1024, next_power_of_two(ff))
        _gate_kernel[(T, triton.cdiv(ff, block))](
            wide, out, ff, block, num_warps=4, **choose_launch_options(wide.device)
        )
    return out


@triton.jit
def _gate_backward_kernel(wide_ptr, d_out_ptr, d_wide_ptr, out_ptr, ff: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the gradients of gate and up in d_wide [T, 2 ff], one row and BLOCK columns per program.

    wide has gate and up side by side, d_out [T, ff] is the gradient of silu(gate) * up. That product is computed again
    and stored in out [T, ff].
    """
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


def apply_gate_backward(wide: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient [T, 2 ff] of `wide`, the input of `apply_gate`, and the output of `apply_gate` [T, ff].

    `d_out` [T, ff] is the gradient of that output. The output is computed again so that it need not be kept from the
    forward pass.
    """
    T, ff = d_out.shape
    assert wide.is_contiguous() and d_out.is_contiguous()
    d_wide, out = torch.empty_like(wide), torch.empty_like(d_out)
    if T:
        block = min(1024, next_power_of_two(ff))
        _gate_backward_kernel[(T, triton.cdiv(ff, block))](wide, d_out, d_wide, out, ff, block, num_warps=4)
    return d_wide, out


# ---- rotation


@triton.jit
def _rotate_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, K: tl.constexpr, g: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Splits qkv and stores its rotated queries in q, its rotated key in k and its value in v.

    A program does one token and one of K KV heads, with g queries of size D. HEADS: g + 1 rounded up to a power of two.
    BACK: instead reads q, k and v as gradients, rotates q and k back, and stores the gradient of qkv in qkv.
    """
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    half: tl.constexpr = D // 2
    # Head h is a query for h < g and the key for h == g. HEADS is the next power of two; heads above are masked.
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
        # A head is either a query or the key, so one of the two masked loads gives zero.
        low = tl.load(to_q, mask=is_q, other=0.0) + tl.load(to_k, mask=is_k, other=0.0)
        high = tl.load(to_q + half, mask=is_q, other=0.0) + tl.load(to_k + half, mask=is_k, other=0.0)
        sin = -sin
    else:
        low = tl.load(of_qkv, mask=h < g + 1, other=0.0)
        high = tl.load(of_qkv + half, mask=h < g + 1, other=0.0)
    dtype: tl.constexpr = low.dtype
    a = low.to(tl.float32)
    b = high.to(tl.float32)
    # Each product with cos is rounded before the addition, as the plain operations do.
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


def split_and_rotate(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits qkv [T, K, g + 2, D] and returns q [T, K, g, D] and k [T, K, D], both rotated, and v [T, K, D].

    Along its third axis qkv has g queries, a key and a value. It must be contiguous, and D a power of two. cos and sin
    of the angles have T * D / 2 entries each. All three results are new tensors.
    """
    T, K, heads, D = qkv.shape
    assert qkv.is_contiguous()
    q = qkv.new_empty(T, K, heads - 2, D)
    k = qkv.new_empty(T, K, D)
    v = qkv.new_empty(T, K, D)
    if T:
        g = heads - 2
        _rotate_kernel[(T, K)](
            qkv, cos, sin, q, k, v, K, g, D, next_power_of_two(g + 1), False, num_warps=1 if g <= 8 else 2
        )
    return q, k, v


def split_and_rotate_backward(d_q: Tensor, d_k: Tensor, d_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the gradient of qkv [T, K, g + 2, D], the input of `split_and_rotate`, from those of its outputs.

    All tensors must be contiguous. cos and sin are those of `split_and_rotate`.
    """
    T, K, g, D = d_q.shape
    d_qkv = d_q.new_empty(T, K, g + 2, D)
    if T:
        warps = 1 if g <= 8 else 2
        _rotate_kernel[(T, K)](d_qkv, cos, sin, d_q, d_k, d_v, K, g, D, next_power_of_two(g + 1), True, num_warps=warps)
    return d_qkv
