"""Computes the KV of tokens that are known already: shared prompts, and the own tokens of a draft that enters.

Of a draft that continues a conversation, the first own tokens are in its pages already.

Letters: T tokens, K KV heads, g query heads per KV head, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.data.transfer import copy_to_device
from cohort.engines.native.cuda.pages import PageArena, PagedPrefix, count_pages
from cohort.engines.native.cuda.rotate import PAGE, Angles, rotate_and_store
from cohort.engines.native.cuda.step import get_qk_norms, run_decoder_fused
from cohort.models.decoder import Decoder, Layer

# A run shares a forward with a run that is longer by up to this factor, padded to it. Shorter runs go apart.
MAX_PADDING = 1.25
# A forward reads the stored KV of so many tokens per token that it may compute. Reading copies it once per query head,
# which takes less than a sixth of the memory that computing a token takes.
MAX_STORED_FACTOR = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRun:
    """Consecutive tokens whose KV is to be computed, after tokens whose KV is stored already.

    Stored is that of a prefix (None = no prefix) and, after it, of the first `num_cached` tokens in the pages of the
    run.
    """

    tokens: Sequence[int]
    pages: list[int]  # where their KV goes, after that of the cached ones
    prefix: PagedPrefix | None = None
    num_cached: int = 0

    @property
    def num_before(self) -> int:
        """Number of tokens before the run: those of its prefix, and the cached ones."""
        return self.num_cached + (0 if self.prefix is None else len(self.prefix.tokens))

    def list_stored_pages(self) -> list[tuple[int, int]]:
        """Returns the pages with the KV of the tokens before the run, in order, and how many tokens each holds."""
        parts = [(self.pages, self.num_cached)]
        if self.prefix is not None:
            parts.insert(0, (self.prefix.pages, len(self.prefix.tokens)))
        return [(pages[i], min(PAGE, num - i * PAGE)) for pages, num in parts for i in range(count_pages(num))]


@torch.no_grad()
def prefill(decoder: Decoder, arena: PageArena, angles: Angles, runs: list[TokenRun], max_tokens: int) -> None:
    """Computes the KV of all runs (known tokens after stored ones, or after nothing) and stores it in their pages.

    The KV of the tokens before a run must be stored already. Several runs of similar length share a forward of at most
    `max_tokens` tokens, padding included. A longer run has a forward of its own; runs without tokens are skipped.
    `angles` holds cosine and sine of the rotation for every position.
    """
    # Runs that begin a sequence are at the front, and in both kinds the longest at the end.
    runs = sorted((r for r in runs if r.tokens), key=lambda r: (r.num_before > 0, len(r.tokens), r.num_before))
    while runs:
        longest = len(runs[-1].tokens)
        num, total, widest = 0, 0, 0
        # Take runs from the end while they are like the longest one and fit beside it.
        for run in reversed(runs):
            alike = (run.num_before > 0) == (runs[-1].num_before > 0) and MAX_PADDING * len(run.tokens) >= longest
            widest = max(widest, run.num_before)
            fits = total + longest <= max_tokens and (num + 1) * widest <= MAX_STORED_FACTOR * max_tokens
            if num and not (alike and fits):
                break
            num, total = num + 1, total + longest
        _compute_runs(decoder, arena, angles, runs[-num:])
        del runs[-num:]


def _compute_runs(decoder: Decoder, arena: PageArena, angles: Angles, runs: list[TokenRun]) -> None:
    """Computes the KV of these runs in one forward and stores it in their pages.

    Either all runs have tokens before them, or none has.
    """
    device = arena.kv.device
    lengths = np.array([len(r.tokens) for r in runs])
    most, rows = int(lengths.max()), len(runs)
    # The run of each token, and its index in the run.
    row = np.repeat(np.arange(rows), lengths)  # [T]
    index = np.arange(len(row)) - np.repeat(lengths.cumsum() - lengths, lengths)
    width = max(len(r.pages) for r in runs)
    table = np.array([r.pages + [0] * (width - len(r.pages)) for r in runs])
    tokens = copy_to_device(np.concatenate([np.array(r.tokens) for r in runs]), device)
    positions = copy_to_device(np.array([r.num_before for r in runs])[row] + index, device)
    offset = np.array([r.num_cached for r in runs])[row] + index  # of each token in the pages of its run
    places = copy_to_device(table[row, offset // PAGE] * PAGE + offset % PAGE, device)
    padded = copy_to_device(row * most + index, device)  # [T], place of each token in a grid of rows x most
    whole = len(row) == rows * most
    stored = _StoredPages.build(runs, most, decoder.embed.dtype, device)

    def pad_to_grid(x: Tensor) -> Tensor:
        """[T, heads, D] -> [rows, heads, most, D]"""
        full = x if whole else x.new_zeros(rows * most, *x.shape[1:]).index_copy_(0, padded, x)
        return full.view(rows, most, *x.shape[1:]).transpose(1, 2)

    def attend(layer: Layer, qkv: Tensor) -> Tensor:
        """qkv [T, K, g + 2, D], not rotated -> [T, K * g * D]"""
        T, K, heads, D = qkv.shape
        pages = arena.get_layer(layer.index)
        q, k = rotate_and_store(qkv, positions, places, angles, get_qk_norms(layer), pages, keep=True)
        keys, values = pad_to_grid(k), pad_to_grid(qkv[:, :, -1].contiguous())  # [rows, K, most, D]
        # The KV of the tokens before comes from its pages, where an earlier forward has stored it.
        if stored is not None:
            keys = torch.cat([stored.gather_kv(pages[0]), keys], dim=2)
            values = torch.cat([stored.gather_kv(pages[1]), values], dim=2)
        mask = None if stored is None else stored.mask
        queries = pad_to_grid(q.view(T, K * (heads - 2), D))  # [rows, K * g, most, D]
        # Flash attention reads each KV head for its g query heads. The other implementations need copies per head.
        grouped = mask is None and queries.is_cuda and queries.dtype != torch.float32
        if not grouped:
            keys, values = (x.repeat_interleave(heads - 2, dim=1) for x in (keys, values))
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        out = mixed.transpose(1, 2).reshape(rows * most, -1)
        return out if whole else out.index_select(0, padded)

    run_decoder_fused(decoder, tokens, attend)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredPages:
    """The pages before some runs, padded to the most, with a mask for stored tokens and run together."""

    table: Tensor  # [rows, pages]
    mask: Tensor  # [rows, 1, most, pages * PAGE + most]

    @staticmethod
    def build(runs: list[TokenRun], most: int, dtype: torch.dtype, device: torch.device) -> _StoredPages | None:
        """Returns the stored KV before the runs as a padded table of pages, with the mask for it and run together.

        `most` is the number of tokens of the longest run; the mask has type `dtype`. None = nothing is before any run.
        """
        lists = [r.list_stored_pages() for r in runs]
        width = max(len(pages) for pages in lists)
        if width == 0:
            return None
        padded = [pages + [(0, 0)] * (width - len(pages)) for pages in lists]
        table = copy_to_device([[page for page, _ in row] for row in padded], device)
        # The last page of a prefix may be half empty, with pages of the run behind it.
        filled = copy_to_device([[num for _, num in row] for row in padded], device)
        before = (torch.arange(PAGE, device=device) < filled[:, :, None]).flatten(1)  # [rows, width * PAGE]
        causal = torch.ones(most, most, dtype=torch.bool, device=device).tril()
        seen = torch.cat(
            [before[:, None].expand(-1, most, -1), causal[None].expand(len(runs), -1, -1)], dim=2
        )  # [rows, most, W]
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
        return _StoredPages(table=table, mask=mask[:, None])

    def gather_kv(self, pages: Tensor) -> Tensor:
        """Returns the stored keys or values in one layer, copied from its pages.

        pages [num_pages, K, PAGE, D] -> [rows, K, pages per row * PAGE, D], one row per run
        """
        rows, width = self.table.shape
        picked = pages.index_select(0, self.table.flatten()).view(rows, width, *pages.shape[1:])
        return picked.transpose(1, 2).flatten(2, 3)
