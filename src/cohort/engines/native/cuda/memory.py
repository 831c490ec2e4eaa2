"""Divides the free GPU memory between KV, prefills and what a decode step needs besides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cohort.models.config import ModelConfig

USABLE_SHARE = 0.9  # of the free memory
MAX_PREFILL_TOKENS = 16384  # in one forward; more make it no faster
MIN_PREFILL_TOKENS = 2048  # in one forward; fewer make it much slower
PREFILL_DIVISOR = 4  # where memory is short, a prefill gets one part in this many


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySplit:
    """How much memory KV gets, and how many tokens a prefill may compute at once."""

    kv_bytes: int
    prefill_tokens: int  # most in one forward; a longer prompt has a forward of its own


def measure_usable_bytes(device: torch.device) -> int:
    """Returns how many bytes this process could allocate on a GPU now, within the limit that it has."""
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction(device) * total
    free = min(free, max(0, int(limit) - torch.cuda.memory_reserved(device)))
    # Freed tensors stay in torch's cache and can be used again, except for splinters of blocks that are in use.
    stats = torch.cuda.memory_stats(device)
    cached = stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]
    return int(free + max(0, cached - stats["inactive_split_bytes.all.current"]))


def divide_memory(free: int, c: ModelConfig, width: int, slots: int, longest: int) -> MemorySplit:
    """Returns how much of `free` bytes of GPU memory KV gets, and how many tokens a prefill may compute at once.

    `c` is the model, `width` the bytes per number, `slots` the most rows of a decode step. `longest` is the number of
    tokens of the longest waiting prompt, which must be computed in one forward. A prefill gets MAX_PREFILL_TOKENS, or
    fewer where memory is short, but at least MIN_PREFILL_TOKENS and `longest`. KV gets what then is left of the usable
    memory (USABLE_SHARE), maybe 0 bytes.

    A 7B model sampled on a card of 24 GiB, where 5.2 are left beside it, or 100:

    >>> from cohort.models.shapes import find_shape
    >>> for gib in (5.2, 100):
    ...     split = divide_memory(int(gib * 2**30), find_shape("qwen2.5-7b"), 2, slots=128, longest=256)
    ...     print(f"{split.kv_bytes / 2**30:.1f} GiB of KV, {split.prefill_tokens} tokens")
    3.4 GiB of KV, 4276 tokens
    85.5 GiB of KV, 16384 tokens
    """
    # A step needs 8 bytes per slot and vocabulary entry: an fp32 logit, and what draws from it.
    usable = max(0, int(USABLE_SHARE * free) - 8 * slots * c.vocab_size)
    per_token = (8 * c.hidden + 6 * c.ff) * width
    least = max(MIN_PREFILL_TOKENS, longest)
    tokens = max(least, min(MAX_PREFILL_TOKENS, usable // PREFILL_DIVISOR // per_token))
    return MemorySplit(kv_bytes=max(0, usable - tokens * per_token), prefill_tokens=tokens)
