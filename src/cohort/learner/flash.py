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
    """Returns the attention output [T, H, D] and the log of each query's softmax normaliser [H, T].

    q is [T, H, D]; k and v are [S, K, D], in the order of `runs`. The mask is causal and aligned at the end of each
    sequence: its last query sees all of its keys, the query before it all but the last key.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *_edge_arguments(runs), 0.0, True, False)
    return out, lse


def flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, runs: Runs
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q [T, H, D], k and v [S, K, D], given the gradient `d_out` of the output.

    The other arguments are those of `flash_forward` and its two results, `out` and `lse`.
    """
    # Random state of the dropout. There is no dropout, but the kernel wants the tensors.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    edges = _edge_arguments(runs)
    return torch.ops.aten._flash_attention_backward(d_out, q, k, v, out, lse, *edges, 0.0, True, state, unused)


class _Attention(torch.autograd.Function):
    """Autograd function of flash attention. The gathered keys and values are not saved: backward gathers them again."""

    @staticmethod
    def forward(ctx, q, k, v, runs):  # type: ignore[no-untyped-def]
        """Returns the attention output [T, H, D], for q [T, H, D] and k, v [T, K, D] in the order of the packed stream.

        `runs` says which queries see which keys. q, k, v and the results are saved for `backward`.
        """
        out, lse = flash_forward(q, _copy_for_spans(k, runs), _copy_for_spans(v, runs), runs)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.runs = runs
        return out

    @staticmethod
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        """Returns the gradients of q, k and v, and None for `runs`, which has no gradient."""
        q, k, v, out, lse = ctx.saved_tensors
        runs = ctx.runs
        # No names for the gathered tensors, so that they are freed as soon as the kernel has run.
        d_q, d_k, d_v = flash_backward(
            d_out.contiguous(), q, _copy_for_spans(k, runs), _copy_for_spans(v, runs), out, lse, runs
        )
        return d_q, *((d_k, d_v) if runs.copies is None else add_up_copies(d_k, d_v, runs.copies)), None


def _edge_arguments(runs: Runs) -> tuple[Tensor, Tensor, int, int]:
    """Returns the four arguments that describe the sequences to the kernels, in the order in which these take them.

    They are the edges of the queries, the edges of the keys, the most queries and the most keys of one sequence.
    """
    return runs.query_edges, runs.key_edges, runs.max_queries, runs.max_keys


def _copy_for_spans(x: Tensor, runs: Runs) -> Tensor:
    """Returns keys or values [S, K, D] in the order in which the spans see them. `x` [T, K, D] is in stream order.

    Those of a shared prompt occur in the prompt's own span and again for every span that sees it. If no prompt is
    shared, `x` itself is returned.
    """
    return x if runs.copies is None else x.index_select(0, runs.copies.stream_index)


def add_up_copies(d_k: Tensor, d_v: Tensor, copies: Copies) -> Sequence[Tensor]:
    """Returns the gradients of k and of v for the packed stream [T, K, D], from those of the copied keys [S, K, D].

    Each token gets the sum over its copies, which `copies` lists. The sum is formed in fp32 or wider and returned in
    the type of the input.
    """
    if has_kernels(d_k):
        from cohort.learner import kernels

        return kernels.sum_copies(d_k, d_v, copies)
    T = len(copies.token_edges) - 1
    totals = [x.new_zeros(T, *x.shape[1:], dtype=torch.promote_types(x.dtype, torch.float32)) for x in (d_k, d_v)]
    pairs = zip(totals, (d_k, d_v), strict=True)
    return [t.index_add_(0, copies.stream_index, x.to(t.dtype)).to(x.dtype) for t, x in pairs]


def make_flash_attention(runs: Runs) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Returns the function attend(layer, q, k, v) with which the decoder attends over one microbatch by flash kernels.

    `runs` says which queries see which keys. q is [T, K, g, D], k and v are [T, K, D], the result is [T, K, g, D].
    `layer` is not used.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, K, g, D], k, v [T, K, D] -> [T, K, g, D]."""
        mixed: Tensor = _Attention.apply(q.flatten(1, 2), k, v, runs)
        return mixed.view(q.shape)

    return attend
