"""Attention over a packed stream, in which each token sees exactly what it may see.

Nowhere is there a mask over all pairs of the packed stream. Each block gathers the queries and keys of its spans (the
keys of a shared prompt once per sibling) and masks only those. On a GPU flash attention does the same without blocks.

Letters: b spans of a block, Lq queries and Lk keys of a span, K KV heads, g query heads per KV head, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.data.layout import Block, Layout
from cohort.learner.flash import make_flash_attention
from cohort.models.decoder import Attend
from cohort.models.functions import has_kernels, is_power_of_two

# Up to so many keys, a CPU computes all scores of a block: a quarter faster than the fused form, in the same memory.
MAX_EXPLICIT_KEYS = 256


def make_packed_attention(layout: Layout, like: Tensor, head_dim: int) -> Attend:
    """Returns the function attend(layer, q, k, v) with which the decoder attends over one microbatch.

    `layout` says which tokens see which. `like` is any weight of the model: its device and type decide whether
    attention is computed by flash kernels (16-bit numbers on a GPU with Triton, `head_dim` a power of two) or in padded
    blocks of torch operations. Index tensors and the masks of blocks are built here once, for all layers.
    """
    if has_kernels(like) and like.dtype in (torch.bfloat16, torch.float16) and is_power_of_two(head_dim):
        return make_flash_attention(layout.make_runs(like.device))
    form = layout.make_blocks(like.device)
    masks = [_make_mask(block, like.dtype) for block in form.blocks]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, K, g, D], k, v [T, K, D] -> [T, K, g, D]: attention of the whole packed stream, block by block."""
        T, K, g, D = q.shape
        outputs = []
        flat_q = q.reshape(T, -1)
        flat_k = k.reshape(T, -1)
        flat_v = v.reshape(T, -1)
        for block, mask in zip(form.blocks, masks, strict=True):
            (b, lq), lk = block.queries.shape, block.keys.shape[1]
            # index_select, because its backward is deterministic on a CPU and that of indexing is not.
            bq = flat_q.index_select(0, block.queries.flatten()).view(b, lq, K, g, D)
            bk = flat_k.index_select(0, block.keys.flatten()).view(b, lk, K, D)
            bv = flat_v.index_select(0, block.keys.flatten()).view(b, lk, K, D)
            mix = _attend_with_all_scores if q.device.type == "cpu" and lk <= MAX_EXPLICIT_KEYS else _attend_fused
            outputs.append(mix(bq, bk, bv, mask).reshape(b * lq, K * g * D))
        # Back into the order of the packed stream; rows of padding are left behind.
        return torch.cat(outputs).index_select(0, form.order).view(T, K, g, D)

    return attend


def _attend_with_all_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Returns softmax(q k^T / sqrt(D) + mask) v [b, Lq, K, g, D] by two matrix products, with all scores in memory.

    q is [b, Lq, K, g, D]; k and v are [b, Lk, K, D]; the mask, [b or 1, 1, Lq, Lk], has -inf for keys that a query must
    not see. The g query heads that share a KV head are further rows of the same matrix product.
    """
    b, lq, K, g, D = q.shape
    lk = k.shape[1]
    queries = (q * D**-0.5).permute(0, 2, 3, 1, 4).reshape(b * K, g * lq, D)
    keys, values = (x.transpose(1, 2).reshape(b * K, lk, D) for x in (k, v))
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(b, K * g, lq, lk).add_(mask)
    weights = torch.softmax(scores, dim=-1).view(b * K, g * lq, lk)
    return torch.bmm(weights, values).view(b, K, g, lq, D).permute(0, 3, 1, 2, 4)


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Returns the same as `_attend_with_all_scores`, by torch's fused attention, which does not store all scores."""
    g = q.shape[3]
    heads = q.flatten(2, 3).transpose(1, 2)  # [b, K * g, Lq, D]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    # On a GPU, the memory-saving form of attention takes no mask together with fewer KV heads than query heads.
    if g > 1 and q.is_cuda:
        k, v = k.repeat_interleave(g, dim=1), v.repeat_interleave(g, dim=1)
    grouped = g > 1 and not q.is_cuda
    mixed = F.scaled_dot_product_attention(heads, k, v, attn_mask=mask, enable_gqa=grouped)
    return mixed.transpose(1, 2).unflatten(2, (-1, g))


def _make_mask(block: Block, dtype: torch.dtype) -> Tensor:
    """Returns the numbers to add to a block's attention scores: 0 where a query sees a key and -inf elsewhere.

    The shape is [b, 1, Lq, Lk], or [1, 1, Lq, Lk] when all spans of the block have the same offset (prompt length).
    """
    lq, lk = block.queries.shape[1], block.keys.shape[1]
    offsets = block.offsets[:1] if block.has_equal_offsets else block.offsets
    device = offsets.device
    last_seen = offsets[:, None] + torch.arange(lq, device=device)  # [b, Lq] last key that each query sees
    seen = torch.arange(lk, device=device) <= last_seen[:, :, None]  # [b, Lq, Lk]
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, float("-inf"))[:, None]
