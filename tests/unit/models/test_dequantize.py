"""Tests of all block formats: the values equal those of the gguf package bit for bit, and some are computed by hand."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from cohort.models.gguf.dequantize import FORMATS, BlockFormat

COMMON = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
BY_NAME = {form.name: (number, form) for number, form in FORMATS.items()}


def unpack_blocks(form: BlockFormat, blocks: bytes) -> Tensor:
    """Returns the weights [blocks, weights per block] of packed blocks."""
    raw = torch.frombuffer(bytearray(blocks), dtype=torch.uint8).view(-1, form.num_bytes)
    # Filled with 7, so that entries which are not written show.
    out = torch.full((raw.shape[0], form.num_weights), 7.0)
    form.unpack(raw, out)
    return out


@pytest.mark.parametrize("name", COMMON)
def test_random_blocks_are_those_of_the_gguf_package(name: str) -> None:
    number, form = BY_NAME[name]
    kind = gguf.GGMLQuantizationType(number)
    assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (form.num_weights, form.num_bytes))
    blocks = np.random.default_rng(number).integers(0, 256, (3000, form.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # a random fp16 scale is infinite or not a number now and then
        expected = torch.from_numpy(gguf.dequantize(blocks, kind).copy()).view(-1, form.num_weights)
    found = unpack_blocks(form, blocks.tobytes())
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found.view(torch.int32)[~nan], expected.view(torch.int32)[~nan])
    assert nan.float().mean() < 0.1


def test_all_common_formats_are_known() -> None:
    assert sorted(BY_NAME) == sorted(COMMON)


def test_q4_0_by_hand() -> None:
    half = struct.pack("<e", 0.5)
    packed = bytes([0x10, 0xF8]) + bytes([0x88]) * 14  # weight 0 is 0, weight 16 is 1; weight 1 is 8, weight 17 is 15
    found = unpack_blocks(BY_NAME["Q4_0"][1], half + packed)
    assert found[0, [0, 1, 2, 16, 17, 18]].tolist() == [-4.0, 0.0, 0.0, -3.5, 3.5, 0.0]


def test_q8_0_by_hand() -> None:
    found = unpack_blocks(BY_NAME["Q8_0"][1], struct.pack("<e32b", 0.25, -128, 127, *range(30)))
    assert found[0].tolist() == [-32.0, 31.75, *(i / 4 for i in range(30))]


def test_q4_k_by_hand() -> None:
    """The block's scale is 1 and its low 1/2. Part 0 has scale 3 and low 2, part 5 scale 63 and low 1, the others 0."""
    six_bits = bytearray(12)
    six_bits[0], six_bits[4] = 3, 2  # part 0: its scale and low
    six_bits[1], six_bits[5] = 0xC0, 0x00  # part 5: the two high bits of its scale, 3 * 16
    six_bits[9] = 0x1F  # part 5: the low four bits of its scale, 15, and its low, 1
    packed = bytearray(128)
    packed[0] = 0x05  # part 0, first weight: 5
    packed[64 + 31] = 0x90  # part 5, last weight: 9
    found = unpack_blocks(BY_NAME["Q4_K"][1], struct.pack("<ee", 1.0, 0.5) + six_bits + packed).view(8, 32)
    assert found[0].tolist() == [3 * 5 - 1.0] + [-1.0] * 31
    assert found[5].tolist() == [-0.5] * 31 + [63 * 9 - 0.5]
    assert found[[1, 2, 3, 4, 6, 7]].abs().sum() == 0


def test_q6_k_by_hand() -> None:
    low, high, scales = bytearray(128), bytearray([0b10101010] * 64), [1] * 16  # high bits 2: every weight is 0
    low[0], high[0] = 0x0F, 0b10101011  # weight 0: 3 * 16 + 15
    low[64 + 32 + 1] = 0x70  # second half, fourth part, second weight: 2 * 16 + 7
    scales[0], scales[14] = -2, 3
    found = unpack_blocks(BY_NAME["Q6_K"][1], bytes(low + high) + struct.pack("<16be", *scales, 2.0))[0]
    assert found[0] == 2.0 * -2 * (63 - 32)
    assert found[128 + 96 + 1] == 2.0 * 3 * 7
    assert found.count_nonzero() == 2
