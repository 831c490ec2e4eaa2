"""Attention over a packed stream: exactly what each token may see, block by block (or by flash attention on a GPU).

No mask over all pairs of the pack exists: each block gathers its segments' queries and keys (a shared prompt's
keys once a sibling) and masks only those.

Letters: b segments of a block, Lq queries and Lk keys of a segment, K KV heads, g query heads a KV head, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.data.layout import Block, Layout
from cohort.learner.flash import flash_attention
from cohort.models.decoder import Attend
from cohort.models.functions import fused, is_power

FEW_KEYS = 256  # up to here all scores of a block on a CPU: a quarter faster than the fused form, in its memory


def packed_attention(layout: Layout, like: Tensor, head_dim: int) -> Attend:
    """The `attend` argument of the decoder for one microbatch, for a model whose weights are `like` this.

    Masks are built once for all layers.
    """
    if fused(like) and like.dtype in (torch.bfloat16, torch.float16) and is_power(head_dim):
        return flash_attention(layout.runs(like.device))
    form = layout.blocks(like.device)
    masks = [_mask(block, like.dtype) for block in form.blocks]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T, K, g, D = q.shape
        outputs = []
        flat_q, flat_k, flat_v = q.reshape(T, -1), k.reshape(T, -1), v.reshape(T, -1)
        for block, mask in zip(form.blocks, masks, strict=True):
            (b, lq), lk = block.queries.shape, block.keys.shape[1]
            # index_select, because its backward is deterministic on CPU and that of indexing is not
            bq = flat_q.index_select(0, block.queries.flatten()).view(b, lq, K, g, D)
            bk = flat_k.index_select(0, block.keys.flatten()).view(b, lk, K, D)
            bv = flat_v.index_select(0, block.keys.flatten()).view(b, lk, K, D)
            mix = _explicit if q.device.type == "cpu" and lk <= FEW_KEYS else _fused
            outputs.append(mix(bq, bk, bv, mask).reshape(b * lq, K * g * D))
        return torch.cat(outputs).index_select(0, form.order).view(T, K, g, D)

    return attend


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [b, Lq, K, g, D], k, v [b, Lk, K, D], mask [b or 1, 1, Lq, Lk] -> [b, Lq, K, g, D]

    The heads that share a KV head are more queries of one matrix product.
    """
    b, lq, K, g, D = q.shape
    lk = k.shape[1]
    queries = (q * D**-0.5).permute(0, 2, 3, 1, 4).reshape(b * K, g * lq, D)
    keys, values = (x.transpose(1, 2).reshape(b * K, lk, D) for x in (k, v))
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(b, K * g, lq, lk).add_(mask)
    weights = torch.softmax(scores, dim=-1).view(b * K, g * lq, lk)
    return torch.bmm(weights, values).view(b, K, g, lq, D).permute(0, 3, 1, 2, 4)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same, without all scores in memory."""
    g = q.shape[3]
    heads = q.flatten(2, 3).transpose(1, 2)  # [b, K * g, Lq, D]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if g > 1 and q.is_cuda:  # with a mask, what saves memory there takes no fewer heads than queries have
        k, v = k.repeat_interleave(g, dim=1), v.repeat_interleave(g, dim=1)
    grouped = g > 1 and not q.is_cuda
    mixed = F.scaled_dot_product_attention(heads, k, v, attn_mask=mask, enable_gqa=grouped)
    return mixed.transpose(1, 2).unflatten(2, (-1, g))


def _mask(block: Block, dtype: torch.dtype) -> Tensor:
    """[b, 1, Lq, Lk], 0 where a key is seen and -inf elsewhere; [1, 1, Lq, Lk] when all offsets are equal."""
    lq, lk = block.queries.shape[1], block.keys.shape[1]
    offsets = block.offsets[:1] if block.alike else block.offsets
    device = offsets.device
    reach = offsets[:, None] + torch.arange(lq, device=device)  # [b, Lq] last key each query sees
    seen = torch.arange(lk, device=device) <= reach[:, :, None]  # [b, Lq, Lk]
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, float("-inf"))[:, None]
