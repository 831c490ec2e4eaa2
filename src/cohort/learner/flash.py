"""Attention over a packed stream on a GPU: torch's flash kernels over sequences laid end to end, any lengths.

Every span is a causal sequence, all in one call. The completions of a shared prompt are besides one long sequence of
queries to it, in a second call, and each joins the two parts of its softmax. Given the joined output and
normaliser, the backward of each call is exactly its part of the whole gradient. Nothing is compiled for a shape.

Letters: T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cohort.data.layout import Runs

Sides = tuple[Tensor, Tensor, int, int]
"""(edges of the queries' sequences, of the keys', longest of each)"""


def forward(q: Tensor, k: Tensor, v: Tensor, sides: Sides, causal: bool) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k, v [S, K, D] -> out [T, H, D], log of each query's normaliser [H, T]."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *sides, 0.0, causal, False)
    return out, lse


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sides: Sides, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v through these keys, where out and lse may be of more keys than these."""
    state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of the dropout, of which there is none
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(d_out, q, k, v, out, lse, *sides, 0.0, causal, state, unused)


def join(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> None:
    """Attention a, in place, over the keys of both."""
    from cohort.learner import kernels

    kernels.join(a, a_lse, b, b_lse)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, runs):  # type: ignore[no-untyped-def]
        out, lse = forward(q, k, v, _own(runs), True)
        if runs.longest_prompt:
            n, here = runs.num_prompt, slice(runs.first, None)
            part, part_lse = forward(q[here], k[:n], v[:n], _across(runs), False)
            join(out[here], lse[:, here], part, part_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.runs = runs
        return out

    @staticmethod
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensors
        runs, d_out = ctx.runs, d_out.contiguous()
        d_q, d_k, d_v = backward(d_out, q, k, v, out, lse, _own(runs), True)
        if runs.longest_prompt:
            n, here = runs.num_prompt, slice(runs.first, None)
            parts = (d_out[here], q[here], k[:n], v[:n], out[here], lse[:, here].contiguous())
            part_q, part_k, part_v = backward(*parts, _across(runs), False)
            d_q[here] += part_q
            d_k[:n] += part_k
            d_v[:n] += part_v
        return d_q, d_k, d_v, None


def _own(runs: Runs) -> Sides:
    return runs.spans, runs.spans, runs.longest, runs.longest


def _across(runs: Runs) -> Sides:
    return runs.groups, runs.prompts, runs.longest_group, runs.longest_prompt


def flash_attention(runs: Runs) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """The `attend` argument of the decoder for one microbatch."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed: Tensor = _Attention.apply(q.flatten(1, 2), k, v, runs)
        return mixed.view(q.shape)

    return attend
