"""Attention over a packed stream on a GPU: torch's flash kernels over sequences laid end to end, any lengths.

Every span is a sequence of queries, all in one call. What a span sees, its prompt and itself, is gathered for the
call: keys and values are few numbers beside the rest, so a shared prompt's are copied once a sibling, and everything
else is computed once. Nothing is compiled for a shape.

Letters: T tokens, S keys with the copies, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cohort.data.layout import Copies, Runs
from cohort.models.functions import fused


def forward(q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k, v [S, K, D] -> out [T, H, D], log of each query's normaliser [H, T].

    Causal from the end: a sequence's last query sees all of its keys.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *_sides(runs), 0.0, True, False)
    return out, lse


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, runs: Runs
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v."""
    state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of the dropout, of which there is none
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(d_out, q, k, v, out, lse, *_sides(runs), 0.0, True, state, unused)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, runs):  # type: ignore[no-untyped-def]
        out, lse = forward(q, _seen(k, runs), _seen(v, runs), runs)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.runs = runs
        return out

    @staticmethod
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensors
        runs = ctx.runs
        d_q, d_k, d_v = backward(d_out.contiguous(), q, _seen(k, runs), _seen(v, runs), out, lse, runs)
        return d_q, *((d_k, d_v) if runs.copies is None else returned(d_k, d_v, runs.copies)), None


def _sides(runs: Runs) -> tuple[Tensor, Tensor, int, int]:
    return runs.queries, runs.keys, runs.longest, runs.most_seen


def _seen(x: Tensor, runs: Runs) -> Tensor:
    """[T, K, D] -> [S, K, D]"""
    return x if runs.copies is None else x.index_select(0, runs.copies.order)


def returned(d_k: Tensor, d_v: Tensor, copies: Copies) -> Sequence[Tensor]:
    """The gradients of k and v [T, K, D] from those of their copies [S, K, D], added up in fp32."""
    if fused(d_k):
        from cohort.learner import kernels

        return kernels.add_copies(d_k, d_v, copies)
    T = len(copies.edges) - 1
    totals = [x.new_zeros(T, *x.shape[1:], dtype=torch.promote_types(x.dtype, torch.float32)) for x in (d_k, d_v)]
    return [t.index_add_(0, copies.order, x.to(t.dtype)).to(x.dtype) for t, x in zip(totals, (d_k, d_v), strict=True)]


def flash_attention(runs: Runs) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """The `attend` argument of the decoder for one microbatch."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed: Tensor = _Attention.apply(q.flatten(1, 2), k, v, runs)
        return mixed.view(q.shape)

    return attend
