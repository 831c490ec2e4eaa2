"""A checksum of a tensor that depends on every bit and its place, computed where the tensor is."""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.engines.sums import mix_bits

CHUNK = 1 << 20  # words that are summed at once: it bounds the memory of products
_WORD = 8  # bytes
_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no part is lost when parts are joined


@torch.no_grad()
def compute_checksum(tensor: Tensor) -> int:
    """Returns a number of 64 bits. Any change of one 8-byte word changes it.

    Changes of several words, such as an exchange or other signs, leave it as it is only by a coincidence of 64 bits.
    The type does not count, only the bytes in row order: compare shapes and types beside it. It is for mistakes, not
    against attacks.

    >>> a = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> compute_checksum(a) == compute_checksum(a.clone()), compute_checksum(a) == compute_checksum(a.flip(0))
    (True, False)
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(data) // _WORD * _WORD
    # A view as words needs an address that is a multiple of their size: a clone has one.
    words = data[:whole] if data.data_ptr() % _WORD == 0 else data[:whole].clone()
    total = _sum_words(words.view(torch.int64))
    if whole < len(data):
        rest = torch.zeros(_WORD, dtype=torch.uint8, device=data.device)
        rest[: len(data) - whole] = data[whole:]
        total = (total * _FACTOR + _sum_words(rest.view(torch.int64))) & _MASK
    return total


def _sum_words(words: Tensor) -> int:
    """Returns the sum of words times odd numbers, modulo 2^64, over parts that are joined in order."""
    # Odd factors can be inverted modulo 2^64, so a change of one word always changes the sum. Integers wrap around.
    factors = 2 * torch.arange(min(CHUNK, len(words)), dtype=torch.int64, device=words.device) + 1
    sums = [(mix_bits(part) * factors[: len(part)]).sum() for part in words.split(CHUNK)]
    total = 0
    # One transfer from the device for all parts.
    for value in torch.stack(sums).tolist() if sums else []:
        total = (total * _FACTOR + value) & _MASK
    return total
