"""The parts of a layer, each with a backward that keeps only its input.

Left to autograd, a norm and a gated unit store every intermediate: a third of a training step's memory on CPU.
On a GPU elementwise work is done by the kernels of `cohort.models.kernels`, where Triton is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
HAS_ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, collect):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.collect = collect
        return product(x, weight, bias, exact=True)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        d_x = product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        d_weight = _weight_grad(grad, x, ctx.needs_input_grad[1], ctx.collect)
        return d_x, d_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        exact = wide(x)
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (exact * scale).to(weight.dtype).mul_(weight)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, scale = ctx.saved_tensors
        normed = wide(x) * scale
        d_weight = (grad * normed.to(grad.dtype)).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        inner = wide(grad * weight)
        along = (inner * normed).mean(-1, keepdim=True)
        d_x = inner.addcmul_(normed, along, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight, None


class _AddNorm(torch.autograd.Function):
    """By kernels, on a GPU. Keeps the sum, which goes on anyway, and one factor a token."""

    @staticmethod
    def forward(ctx, x, y, weight, eps):  # type: ignore[no-untyped-def]
        kernels = _kernels()
        total = x if y is None else torch.empty_like(x)
        scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        normed = kernels.add_norm(x, y, weight, eps, total, scale)
        ctx.save_for_backward(total, weight, scale)
        ctx.y_dtype = None if y is None else y.dtype
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx, d_total, d_normed):  # type: ignore[no-untyped-def]
        total, weight, scale = ctx.saved_tensors
        d_normed = torch.zeros_like(total, dtype=weight.dtype) if d_normed is None else d_normed.contiguous()
        d_x, d_y, d_weight = _kernels().norm_backward(total, weight, scale, d_normed, d_total, ctx.y_dtype)
        return d_x, d_y, d_weight, None


class _SplitRotated(torch.autograd.Function):
    """By kernels, on a GPU. The fused product is not kept."""

    @staticmethod
    def forward(ctx, qkv, cos, sin):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        return _kernels().split_rotated(qkv, cos, sin)

    @staticmethod
    def backward(ctx, d_q, d_k, d_v):  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        grads = (x.contiguous() for x in (d_q, d_k, d_v))
        return _kernels().split_rotated_backward(*grads, cos, sin), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate_up, gate_up_bias, down, down_bias, collect_gate_up, collect_down):  # type: ignore[no-untyped-def]
        both = product(x, gate_up, gate_up_bias)  # [T, 2 ff]
        ctx.save_for_backward(x, gate_up, down, both)
        ctx.collect_gate_up, ctx.collect_down = collect_gate_up, collect_down
        return product(_opened(both), down, down_bias, exact=True)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, gate_up, down, both = ctx.saved_tensors
        needs = ctx.needs_input_grad
        d_both, inner = _opened_backward(both, product(grad, down.t()))
        d_down = _weight_grad(grad, inner, needs[3], ctx.collect_down)
        d_x = product(d_both, gate_up.t()) if needs[0] else None
        d_gate_up = _weight_grad(d_both, x, needs[1], ctx.collect_gate_up)
        d_gate_up_bias = d_both.sum(0) if needs[2] else None
        d_down_bias = grad.sum(0) if needs[4] else None
        return d_x, d_gate_up, d_gate_up_bias, d_down, d_down_bias, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None  # the inverse of a rotation is its transpose


Product = Callable[[Tensor, Tensor | None], Tensor]
"""(x [T, d], bias [n]) -> [T, n], with a matrix it knows."""

_substitutes: Mapping[int, Product] = {}


@contextmanager
def substituted(products: Mapping[int, Product]) -> Iterator[None]:
    """Within, products with the matrices at these addresses are computed so: from packed copies of them, say."""
    global _substitutes
    before, _substitutes = _substitutes, products
    try:
        yield
    finally:
        _substitutes = before


Collector = Callable[[Tensor, Tensor], None]
"""Gets (gradient [T, n] of a product's output, its input x [T, d]): what the matrix's gradient is made of."""


def _weight_grad(grad: Tensor, x: Tensor, needed: bool, collect: Collector | None) -> Tensor | None:
    """The gradient [n, d] of a matrix from that of its product [T, n]; None where a collector gets its parts."""
    if collect is not None:
        collect(grad, x)
        return None
    return grad.t() @ x if needed else None


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, exact: bool = False) -> Tensor:
    """x @ weight.T (+ bias) [T, n], without autograd. On x86 in fp32 by oneDNN, which is a tenth faster than MKL.

    `exact` = not by oneDNN: its sums are less exact (SmolLM2's log-probabilities lie 1.1e-5 from float64 instead of
    0.8e-5), and only for wide matrices, a gate or a head, is it much faster forward.
    """
    if _substitutes and (substitute := _substitutes.get(weight.data_ptr())) is not None:
        return substitute(x, bias)
    if HAS_ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and not exact:
        return onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [n, d] += a^T b, in the total's type: fp32 also where a [T, n] and b [T, d] are bf16."""
    if total.dtype == a.dtype:
        total.addmm_(a.t(), b)
    elif a.is_cuda:
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a.t() @ b)


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same by oneDNN; the matrix may be one that it packed."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in at least fp32, without autograd: logits rounded to bf16 would be most of the sampler's gap."""
    if x.dtype in (torch.float32, torch.float64):
        return product(x, weight)
    if x.device.type == "cuda":
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, collect: Collector | None = None) -> Tensor:
    """x [T, d], weight [n, d], bias [n] -> [T, n]. With `collect` the weight gets no gradient: see `Collector`."""
    if not torch.is_grad_enabled():
        return product(x, weight, bias, exact=True)
    return _Linear.apply(x, weight, bias, collect)


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The stream x [T, d] with y added (where there is one), and its norm in the weight's type."""
    if fused(x):
        total, normed = _AddNorm.apply(x, y, weight, eps)
        return total, normed
    x = x if y is None else x + y
    return x, rms_norm(x, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, computed in at least fp32, in the weight's type."""
    if fused(x):
        normed: Tensor = _AddNorm.apply(x.reshape(-1, x.shape[-1]).contiguous(), None, weight, eps)[1]
        return normed.view(x.shape)
    return _RmsNorm.apply(x, weight, eps)


def gated(
    x: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    collect_gate_up: Collector | None = None,
    collect_down: Collector | None = None,
) -> Tensor:
    """down(silu(gate(x)) * up(x)): x [T, d], gate_up [2 ff, d], down [d, ff]. Keeps [T, 2 ff], not the product."""
    return _Gated.apply(x, gate_up, gate_up_bias, down, down_bias, collect_gate_up, collect_down)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of the last axis, halves convention. x [T, K, h, D], cos and sin [T, 1, 1, D/2]."""
    return _Rotate.apply(x, cos, sin)


def split_rotated(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, K, g + 2, D] -> q [T, K, g, D] and k [T, K, D], rotated, and v [T, K, D]."""
    if fused(qkv) and is_power(qkv.shape[-1]):
        q, k, v = _SplitRotated.apply(qkv, cos, sin)
        return q, k, v
    qk, v = qkv.split([qkv.shape[2] - 1, 1], dim=2)  # its backward is one copy, that of slices three
    q, k = rotate(qk, cos, sin).split([qk.shape[2] - 1, 1], dim=2)
    return q, k[:, :, 0], v[:, :, 0]


def is_power(n: int) -> bool:
    """Of two: the head sizes that kernels take."""
    return n & (n - 1) == 0


def fused(x: Tensor) -> bool:
    """Are there kernels for this?"""
    return x.is_cuda and x.dtype != torch.float64 and HAS_TRITON


def _kernels():  # type: ignore[no-untyped-def]
    """Imported where there is a GPU: compiling is what Triton is for."""
    from cohort.models import kernels

    return kernels


def _opened(both: Tensor) -> Tensor:
    """silu(gate) * up of [T, gate | up]."""
    if fused(both):
        inner: Tensor = _kernels().gate(both)
        return inner
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _opened_backward(both: Tensor, d_inner: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of both [T, 2 ff], and silu(gate) * up once more. Takes d_inner's place."""
    if fused(both):
        d_both, inner = _kernels().gate_backward(both, d_inner)
        return d_both, inner
    gate, up = both.chunk(2, dim=-1)
    d_both = torch.empty_like(both)
    d_gate, d_up = d_both.chunk(2, dim=-1)
    opened = F.silu(gate)
    torch.mul(opened, d_inner, out=d_up)
    torch.ops.aten.silu_backward(d_inner.mul_(up), gate, grad_input=d_gate)
    return d_both, opened.mul_(up)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (a, b), (low, high) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(a, cos, out=low).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=high).addcmul_(a, sin)
    return out


def wide(x: Tensor) -> Tensor:
    """In at least fp32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
