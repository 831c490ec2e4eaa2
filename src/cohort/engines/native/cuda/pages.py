"""KV in pages: one arena, allocated once, so that captured graphs stay valid.

A request's pages are reserved when it enters, for the longest it may become: what runs always ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cohort.data.transfer import put
from cohort.engines.native.cuda.rotate import PAGE
from cohort.engines.native.kv import Prefix
from cohort.models.config import ModelConfig


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one page in all layers, keys and values."""
    return 2 * config.num_layers * config.num_kv_heads * PAGE * config.head_dim * dtype.itemsize


class Arena:
    """`num` pages of every layer, [L, 2, num, K, PAGE, D]. Page 0 is nobody's."""

    def __init__(self, config: ModelConfig, num: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_layers, 2, num, config.num_kv_heads, PAGE, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.num = num
        self.free = list(range(num - 1, 0, -1))

    def take(self, num: int) -> list[int]:
        assert num <= len(self.free), "pages are counted before they are taken"
        taken = self.free[len(self.free) - num :]
        del self.free[len(self.free) - num :]
        return taken

    def give(self, pages: list[int]) -> None:
        self.free += pages

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values, [num, K, PAGE, D] each."""
        return self.kv[index, 0], self.kv[index, 1]


@dataclass(eq=False, kw_only=True, slots=True)
class PagedPrefix(Prefix):
    """A prefix whose KV lies in pages. `entry` is its row in the table of prefixes, -1 = not computed."""

    pages: list[int] = field(default_factory=list)


class Tables:
    """Which pages each prefix and each row reads, on the device."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.device = device
        self.own = torch.zeros(rows, width, dtype=torch.int32, device=device)
        entries = 2 * rows  # also for prompts whose other samples still wait
        self.prefix = torch.zeros(entries, width, dtype=torch.int32, device=device)
        self.prefix_length = torch.zeros(entries, dtype=torch.int32, device=device)
        self.entries = list(range(entries - 1, -1, -1))  # free ones

    @staticmethod
    def _padded(lists: list[list[int]], width: int) -> list[list[int]]:
        return [pages + [0] * (width - len(pages)) for pages in lists]

    def set_own(self, first: int, lists: list[list[int]]) -> None:
        rows = self._padded(lists, self.own.shape[1])
        self.own[first : first + len(lists)] = put(rows, self.device, torch.int32)

    def set_prefixes(self, prefixes: list[PagedPrefix]) -> None:
        if not prefixes:
            return
        at = put([p.entry for p in prefixes], self.device)
        rows = self._padded([p.pages for p in prefixes], self.prefix.shape[1])
        self.prefix[at] = put(rows, self.device, torch.int32)
        self.prefix_length[at] = put([len(p.tokens) for p in prefixes], self.device, torch.int32)
