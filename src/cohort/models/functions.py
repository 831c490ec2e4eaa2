"""The elementwise parts of a layer, each with a backward that keeps only its input.

Left to autograd, a norm and a gated unit store every intermediate: a third of a training step's memory on CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, scale = ctx.saved_tensors
        normed = _wide(x) * scale
        d_weight = (grad * normed.to(grad.dtype)).flatten(0, -2).sum(0)
        inner = _wide(grad * weight)
        along = (inner * normed).mean(-1, keepdim=True)
        d_x = inner.addcmul_(normed, along, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return d_gate_up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis, computed in at least fp32."""
    return _RmsNorm.apply(x, weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., gate | up]."""
    return _SwiGlu.apply(gate_up)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
