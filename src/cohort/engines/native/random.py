"""Keyed randomness: one uniform number for every (key, token position), whatever the batch, slot or order.

A key is hashed once to a random stream, a 64-bit integer. A uniform number is a counter-based hash of (random stream,
position) in wrapping 64-bit integers, so that CPU and CUDA give the same bits.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from cohort.types import Key

# Constants of the 64-bit finaliser (Stafford's mix 13), signed because torch has no uint64 products.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)


def derive_random_stream(key: Key) -> int:
    """Returns the number of the random stream that belongs to a key: a signed 64-bit hash, equal on every machine.

    >>> derive_random_stream(Key(seed=0, purpose="train", task="t", prompt_id="7", visit=0, sample=3))
    -6122594671877502583
    """
    fields = [key.seed, key.purpose, key.task, key.prompt_id, key.visit, key.sample]
    # JSON quotes every string, so no two different keys are written alike.
    canonical = json.dumps(fields, ensure_ascii=True, separators=(",", ":")).encode()
    digest = hashlib.blake2b(canonical, digest_size=8, person=b"cohort-stream").digest()
    return int.from_bytes(digest, "little", signed=True)


def draw_uniforms(stream: Tensor, position: Tensor) -> Tensor:
    """Returns one uniform number in [0, 1) per pair of random stream and token position, float64 with 53 random bits.

    `stream` and `position` are int64 tensors of equal shape. The same pair always gives the same number.
    """
    bits = mix_bits(stream ^ mix_bits(position + GOLDEN))
    return shift_right(bits, 11).to(torch.float64) * 2.0**-53


def mix_bits(x: Tensor) -> Tensor:
    """Returns int64 numbers with mixed bits: a bijection in which each input bit flips about half of the output."""
    x = (x ^ shift_right(x, 30)) * MIX_1
    x = (x ^ shift_right(x, 27)) * MIX_2
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Returns int64 numbers shifted to the right by 1 to 63 `bits`, filled with zeros.

    Torch's own shift repeats the sign bit.
    """
    return (x >> bits) & ((1 << (64 - bits)) - 1)
