"""KV in pages of one arena, which is allocated once, so that captured graphs stay valid.

A request's pages are reserved when it enters, for the longest it may become. So a running request never runs out of
pages and is never thrown out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cohort.data.transfer import copy_to_device
from cohort.engines.native.cuda.rotate import PAGE
from cohort.engines.native.kept import KeptDraft
from cohort.engines.native.kv import Prefix
from cohort.models.config import ModelConfig


def count_pages(tokens: int) -> int:
    """Returns the number of pages (PAGE tokens each) that are needed for this many tokens."""
    return -(-tokens // PAGE)


def count_page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of one page: keys and values of PAGE tokens in all layers, stored as `dtype`."""
    return 2 * config.num_layers * config.num_kv_heads * PAGE * config.head_dim * dtype.itemsize


class PageArena:
    """The memory of `num_pages` pages, [L, 2, num_pages, K, PAGE, D], and the list of free pages.

    Page 0 is never given to a request: rows that are done write there.
    """

    def __init__(self, config: ModelConfig, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_layers, 2, num_pages, config.num_kv_heads, PAGE, config.head_dim)
        # Zeroed, because masked positions get weight zero, and zero times garbage could be NaN.
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.num_pages = num_pages
        self.free_pages = list(range(num_pages - 1, 0, -1))

    def take_over(self, smaller: PageArena) -> None:
        """Copies the KV of a smaller arena and its list of free pages. All pages keep their index.

        No page of this arena may be in use.
        """
        self.kv[:, :, : smaller.num_pages] = smaller.kv
        self.free_pages = [*range(self.num_pages - 1, smaller.num_pages - 1, -1), *smaller.free_pages]

    def take_pages(self, num: int) -> list[int]:
        """Removes `num` pages from the list of free pages and returns their indices. So many must be free."""
        assert num <= len(self.free_pages), "pages are counted before they are taken"
        # From the end of the list, which is the cheap side.
        taken = self.free_pages[len(self.free_pages) - num :]
        del self.free_pages[len(self.free_pages) - num :]
        return taken

    def return_pages(self, pages: list[int]) -> None:
        """Puts pages back into the list of free pages. Their contents stay until they are overwritten."""
        self.free_pages += pages

    def get_layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns views of the keys and of the values of layer `index`, [num_pages, K, PAGE, D] each."""
        return self.kv[index, 0], self.kv[index, 1]


@dataclass(eq=False, kw_only=True, slots=True)
class PagedPrefix(Prefix):
    """A prefix whose KV lies in pages. `entry` is its row in the table of prefixes, -1 = it has no pages."""

    pages: list[int] = field(default_factory=list)


@dataclass(eq=False, kw_only=True, slots=True)
class KeptPages(KeptDraft):
    """Kept KV that stays in its pages. If memory is short it loses them, and then its tokens."""

    pages: list[int]


class PageTables:
    """Tensors on the device that say which pages each row and each prefix reads. Unused columns are page 0."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.device = device
        self.own = torch.zeros(rows, width, dtype=torch.int32, device=device)  # pages of own tokens, per row
        # Twice as many prefixes as rows: also prompts whose other samples still wait stay computed.
        entries = 2 * rows
        self.prefix = torch.zeros(entries, width, dtype=torch.int32, device=device)
        self.prefix_length = torch.zeros(entries, dtype=torch.int32, device=device)  # in tokens
        self.free_entries = list(range(entries - 1, -1, -1))  # unused rows of `prefix`

    @staticmethod
    def _pad_lists(lists: list[list[int]], width: int) -> list[list[int]]:
        """Returns copies of the lists, each filled up with 0 to `width` items."""
        return [pages + [0] * (width - len(pages)) for pages in lists]

    def set_own_pages(self, first: int, lists: list[list[int]]) -> None:
        """Writes the pages of own tokens into the device table: one list per row, from row `first` on.

        The rest of each row becomes 0.
        """
        rows = self._pad_lists(lists, self.own.shape[1])
        self.own[first : first + len(lists)] = copy_to_device(rows, self.device, torch.int32)

    def set_prefix_pages(self, prefixes: list[PagedPrefix]) -> None:
        """Writes the pages and lengths of these prefixes into the device tables, each at its `entry`."""
        if not prefixes:
            return
        entries = copy_to_device([p.entry for p in prefixes], self.device)
        rows = self._pad_lists([p.pages for p in prefixes], self.prefix.shape[1])
        self.prefix[entries] = copy_to_device(rows, self.device, torch.int32)
        self.prefix_length[entries] = copy_to_device([len(p.tokens) for p in prefixes], self.device, torch.int32)
