"""Tokens that are given, not drawn: shared prompts, and what a draft has of its own when it enters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.data.transfer import put
from cohort.engines.native.cuda.pages import Arena, PagedPrefix
from cohort.engines.native.cuda.rotate import PAGE, Angles, rotate_and_store
from cohort.engines.native.cuda.step import fused_forward, qk_norms
from cohort.models.decoder import Decoder, Layer

PADDING = 1.25  # runs this much shorter than the longest of a forward are padded to it; shorter ones go apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Tokens to be computed, one after the other, behind a prefix that already is (or behind nothing)."""

    tokens: Sequence[int]
    pages: list[int]  # where their KV goes
    behind: PagedPrefix | None = None

    @property
    def base(self) -> int:
        return 0 if self.behind is None else len(self.behind.tokens)


@torch.no_grad()
def prefill(decoder: Decoder, arena: Arena, angles: Angles, runs: list[Run], most: int) -> None:
    """Compute the runs' KV, several in one forward, of at most `most` tokens (a longer run goes alone)."""
    runs = sorted((r for r in runs if r.tokens), key=lambda r: (r.base > 0, len(r.tokens), r.base))
    while runs:
        shape, num, total = len(runs[-1].tokens), 0, 0
        for run in reversed(runs):  # the longest first
            alike = (run.base > 0) == (runs[-1].base > 0) and PADDING * len(run.tokens) >= shape
            if num and (not alike or total + shape > most):
                break
            num, total = num + 1, total + shape
        _forward(decoder, arena, angles, runs[-num:])
        del runs[-num:]


def _forward(decoder: Decoder, arena: Arena, angles: Angles, runs: list[Run]) -> None:
    device = arena.kv.device
    lengths = np.array([len(r.tokens) for r in runs])
    most, rows = int(lengths.max()), len(runs)
    row = np.repeat(np.arange(rows), lengths)  # [T]
    at = np.arange(len(row)) - np.repeat(lengths.cumsum() - lengths, lengths)
    width = max(len(r.pages) for r in runs)
    table = np.array([r.pages + [0] * (width - len(r.pages)) for r in runs])
    tokens = put(np.concatenate([np.array(r.tokens) for r in runs]), device)
    positions = put(np.array([r.base for r in runs])[row] + at, device)
    places = put(table[row, at // PAGE] * PAGE + at % PAGE, device)
    padded = put(row * most + at, device)
    whole = len(row) == rows * most
    behind = _Behind.of(runs, most, decoder.embed.dtype, device)

    def grid(x: Tensor) -> Tensor:  # [T, heads, D] -> [rows, heads, most, D]
        full = x if whole else x.new_zeros(rows * most, *x.shape[1:]).index_copy_(0, padded, x)
        return full.view(rows, most, *x.shape[1:]).transpose(1, 2)

    def attend(layer: Layer, qkv: Tensor) -> Tensor:
        T, K, heads, D = qkv.shape
        pages = arena.layer(layer.index)
        q, k = rotate_and_store(qkv, positions, places, angles, qk_norms(layer), pages, keep=True)
        keys, values = grid(k), grid(qkv[:, :, -1].contiguous())  # [rows, K, most, D]
        if behind is not None:
            keys = torch.cat([behind.read(pages[0]), keys], dim=2)
            values = torch.cat([behind.read(pages[1]), values], dim=2)
        mask = None if behind is None else behind.mask
        queries = grid(q.view(T, K * (heads - 2), D))  # [rows, K * g, most, D]
        grouped = mask is None and queries.is_cuda and queries.dtype != torch.float32  # flash attention can
        if not grouped:
            keys, values = (x.repeat_interleave(heads - 2, dim=1) for x in (keys, values))
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        out = mixed.transpose(1, 2).reshape(rows * most, -1)
        return out if whole else out.index_select(0, padded)

    fused_forward(decoder, tokens, attend)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Behind:
    """The prefixes of some runs, padded to the longest."""

    table: Tensor  # [rows, pages]
    mask: Tensor  # [rows, 1, most, pages * PAGE + most]

    @staticmethod
    def of(runs: list[Run], most: int, dtype: torch.dtype, device: torch.device) -> _Behind | None:
        lists = [[] if r.behind is None else r.behind.pages for r in runs]
        width = max(len(pages) for pages in lists)
        if width == 0:
            return None
        table = put([pages + [0] * (width - len(pages)) for pages in lists], device)
        lengths = put([r.base for r in runs], device)
        before = torch.arange(width * PAGE, device=device) < lengths[:, None]  # [rows, width * PAGE]
        causal = torch.ones(most, most, dtype=torch.bool, device=device).tril()
        seen = torch.cat(
            [before[:, None].expand(-1, most, -1), causal[None].expand(len(runs), -1, -1)], dim=2
        )  # [rows, most, W]
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
        return _Behind(table=table, mask=mask[:, None])

    def read(self, pages: Tensor) -> Tensor:
        """[num, K, PAGE, D] -> [rows, K, pages * PAGE, D]"""
        rows, width = self.table.shape
        picked = pages.index_select(0, self.table.flatten()).view(rows, width, *pages.shape[1:])
        return picked.transpose(1, 2).flatten(2, 3)
