"""Attention over a packed stream: exactly what each token may see, block by block.

No mask over all pairs of the pack exists: each block gathers its segments' queries and keys (a shared prompt's
keys once a sibling) and masks only those.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.data.batch import Block, Layout
from cohort.models.decoder import Attend


def packed_attention(layout: Layout, dtype: torch.dtype) -> Attend:
    """The `attend` argument of the decoder for one microbatch. Masks are built once for all layers."""
    masks = [_mask(block, dtype) for block in layout.blocks]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T, K, g, D = q.shape
        outputs = []
        flat_q, flat_k, flat_v = q.reshape(T, -1), k.reshape(T, -1), v.reshape(T, -1)
        for block, mask in zip(layout.blocks, masks, strict=True):
            (b, lq), lk = block.queries.shape, block.keys.shape[1]
            # index_select, because its backward is deterministic on CPU and that of indexing is not
            bq = flat_q.index_select(0, block.queries.flatten()).view(b, lq, K * g, D).transpose(1, 2)
            bk = flat_k.index_select(0, block.keys.flatten()).view(b, lk, K, D).transpose(1, 2)
            bv = flat_v.index_select(0, block.keys.flatten()).view(b, lk, K, D).transpose(1, 2)
            out = F.scaled_dot_product_attention(bq, bk, bv, attn_mask=mask, enable_gqa=g > 1)  # [b, H, Lq, D]
            outputs.append(out.transpose(1, 2).reshape(b * lq, K * g * D))
        return torch.cat(outputs).index_select(0, layout.order).view(T, K, g, D)

    return attend


def _mask(block: Block, dtype: torch.dtype) -> Tensor:
    """[b, 1, Lq, Lk], 0 where a key is seen and -inf elsewhere; [1, 1, Lq, Lk] when all offsets are equal."""
    lq, lk = block.queries.shape[1], block.keys.shape[1]
    offsets = block.offsets[:1] if bool((block.offsets == block.offsets[0]).all()) else block.offsets
    device = offsets.device
    reach = offsets[:, None] + torch.arange(lq, device=device)  # [b, Lq] last key each query sees
    seen = torch.arange(lk, device=device) <= reach[:, :, None]  # [b, Lq, Lk]
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, float("-inf"))[:, None]
