"""The checksum of a tensor: every bit and its place count, and the device or layout does not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.engines.fleet import checksum
from cohort.engines.fleet.checksum import compute_checksum
from cohort.engines.sums import sum_bits

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def draw(num: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num", [0, 1, 3, 7, 8, 1000, 1001])
def test_equal_bytes_have_equal_checksums(dtype: torch.dtype, num: int):
    x = draw(num, dtype)
    assert compute_checksum(x) == compute_checksum(x.clone()) == compute_checksum(torch.cat([x[:1], x])[1:][:num])
    assert 0 <= compute_checksum(x) < 1 << 64


@given(num=st.integers(1, 400), place=st.integers(0, 399), bit=st.integers(0, 15), dtype=st.sampled_from(TYPES))
@settings(deadline=None)
def test_a_change_of_one_bit_is_seen(num: int, place: int, bit: int, dtype: torch.dtype):
    x = draw(num, dtype)
    bits = x.clone().view(torch.int16)
    at = place % len(bits)
    bits[at] ^= torch.tensor(1 << bit if bit < 15 else -(1 << 15), dtype=torch.int16)
    assert compute_checksum(x) != compute_checksum(bits.view(dtype))


@pytest.mark.parametrize("chunk", [4, 5, 1 << 20])
def test_order_counts_also_across_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checksum, "CHUNK", chunk)
    x = draw(64, torch.float64)
    values = {compute_checksum(x.roll(shift)) for shift in range(64)}
    assert len(values) == 64
    swapped = x.clone()
    swapped[[1, 60]] = swapped[[60, 1]]
    assert compute_checksum(swapped) != compute_checksum(x)


def test_a_transposed_matrix_has_another_checksum_and_its_copy_in_rows_the_same():
    x = draw(64, torch.float32).view(8, 8)
    assert compute_checksum(x.T) != compute_checksum(x)
    assert compute_checksum(x.T) == compute_checksum(x.T.contiguous())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_other_signs_are_seen(dtype: torch.dtype, every: int):
    """The sign is the highest bit of a number, and of a word: an even number of changes there is 0 in a plain sum."""
    x = draw(1000, dtype)
    negated = x.clone()
    negated[every - 1 :: every] *= -1
    assert compute_checksum(negated) != compute_checksum(x)
    x[[3, 7]] = torch.tensor([1.5, -1.5], dtype=dtype)
    exchanged = x.clone()
    exchanged[[3, 7]] = x[[7, 3]]
    assert compute_checksum(exchanged) != compute_checksum(x)
    assert sum_bits([negated]) != sum_bits([x]) and sum_bits([exchanged]) == sum_bits([x])
