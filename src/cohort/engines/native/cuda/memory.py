"""How the engine divides the memory that is free: KV, and what a step and a prefill need besides."""

from __future__ import annotations

from dataclasses import dataclass

from cohort.models.config import ModelConfig

SHARE = 0.9  # of what is free, at most
MOST_PREFILL = 16384  # tokens in one forward beyond which it gets no faster
LEAST_PREFILL = 2048  # below which it gets much slower
WORK_SHARE = 4  # one part in so many for a prefill's work, where memory is short


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    kv: int  # bytes
    prefill_tokens: int  # most in one forward; a longer prompt goes alone


def divide(free: int, c: ModelConfig, width: int, slots: int, longest: int) -> Room:
    """`width` is the bytes of a number, `longest` the tokens of the longest prompt that waits, computed in one go.

    Prompts are computed in smaller parts before KV gets too little.

    A 7B model sampled on a card of 24 GiB, where 5.2 are left beside it, or 100:

    >>> from cohort.models.shapes import named_shape
    >>> for gib in (5.2, 100):
    ...     room = divide(int(gib * 2**30), named_shape("qwen2.5-7b"), 2, slots=128, longest=256)
    ...     print(f"{room.kv / 2**30:.1f} GiB of KV, {room.prefill_tokens} tokens")
    3.4 GiB of KV, 4276 tokens
    85.5 GiB of KV, 16384 tokens
    """
    usable = max(0, int(SHARE * free) - 8 * slots * c.vocab_size)  # logits, and what draws from them
    per_token = (8 * c.hidden + 6 * c.ff) * width
    least = max(LEAST_PREFILL, longest)
    tokens = max(least, min(MOST_PREFILL, usable // WORK_SHARE // per_token))
    return Room(kv=max(0, usable - tokens * per_token), prefill_tokens=tokens)
