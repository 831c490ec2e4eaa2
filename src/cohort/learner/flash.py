"""Attention over a packed stream on a GPU, by torch's flash kernels over sequences of any lengths, laid end to end.

Every span is a sequence of queries, and all are in one call. The keys and values that a span sees, those of its prompt
and its own, are gathered for the call. Keys and values are few numbers beside the rest. So those of a shared prompt are
copied once per sibling, and everything else is computed once. Nothing is compiled for a particular shape.

Letters: T tokens, S keys with the copies, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cohort.data.layout import Copies, Runs
from cohort.models.functions import has_kernels


def flash_forward(q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k, v [S, K, D] -> output [T, H, D], and the log of each query's normaliser [H, T].

    The causal mask is aligned at the end: the last query of a sequence sees all of its keys.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *_kernel_edges(runs), 0.0, True, False)
    return out, lse


def flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, runs: Runs
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v. `out` and `lse` are the results of `flash_forward`."""
    # Random state of the dropout. There is no dropout, but the kernel wants the tensors.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    edges = _kernel_edges(runs)
    return torch.ops.aten._flash_attention_backward(d_out, q, k, v, out, lse, *edges, 0.0, True, state, unused)


class _Attention(torch.autograd.Function):
    """Autograd function of flash attention. The gathered keys and values are not saved: backward gathers them again."""

    @staticmethod
    def forward(ctx, q, k, v, runs):  # type: ignore[no-untyped-def]
        """q [T, H, D], k, v [T, K, D] -> output [T, H, D]."""
        out, lse = flash_forward(q, _gather_seen(k, runs), _gather_seen(v, runs), runs)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.runs = runs
        return out

    @staticmethod
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        """Returns the gradients of q, k and v, and None for `runs`."""
        q, k, v, out, lse = ctx.saved_tensors
        runs = ctx.runs
        # No names for the gathered tensors, so that they are freed as soon as the kernel has run.
        d_q, d_k, d_v = flash_backward(
            d_out.contiguous(), q, _gather_seen(k, runs), _gather_seen(v, runs), out, lse, runs
        )
        return d_q, *((d_k, d_v) if runs.copies is None else add_up_copies(d_k, d_v, runs.copies)), None


def _kernel_edges(runs: Runs) -> tuple[Tensor, Tensor, int, int]:
    """Returns (query edges, key edges, most queries, most keys), in the order of the kernel's arguments."""
    return runs.query_edges, runs.key_edges, runs.max_queries, runs.max_keys


def _gather_seen(x: Tensor, runs: Runs) -> Tensor:
    """[T, K, D] -> [S, K, D]: keys or values in the order in which the spans see them."""
    return x if runs.copies is None else x.index_select(0, runs.copies.stream_index)


def add_up_copies(d_k: Tensor, d_v: Tensor, copies: Copies) -> Sequence[Tensor]:
    """Returns the gradients of k and v [T, K, D] from those of their copies [S, K, D], added up in fp32."""
    if has_kernels(d_k):
        from cohort.learner import kernels

        return kernels.sum_copies(d_k, d_v, copies)
    T = len(copies.token_edges) - 1
    totals = [x.new_zeros(T, *x.shape[1:], dtype=torch.promote_types(x.dtype, torch.float32)) for x in (d_k, d_v)]
    pairs = zip(totals, (d_k, d_v), strict=True)
    return [t.index_add_(0, copies.stream_index, x.to(t.dtype)).to(x.dtype) for t, x in pairs]


def make_flash_attention(runs: Runs) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Returns the `attend` function of the decoder for one microbatch."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, K, g, D], k, v [T, K, D] -> [T, K, g, D]."""
        mixed: Tensor = _Attention.apply(q.flatten(1, 2), k, v, runs)
        return mixed.view(q.shape)

    return attend
