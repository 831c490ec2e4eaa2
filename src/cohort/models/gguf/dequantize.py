"""The block formats of GGUF: functions that unpack bytes into the fp32 weights that they stand for.

A block is a row of bytes: some scales, and a few bits (q) for each of its weights. Each function takes many blocks and
writes their weights. Every product and sum is rounded separately, in the order of the reference, so that the values
equal those of the `gguf` package bit for bit.

In docstrings, "scale" and "low" are fp16 numbers of a block, and q is the small integer of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Unpack = Callable[[Tensor, Tensor], None]
"""Called as unpack(blocks, out): blocks is uint8 [n, bytes per block], out is float32 [n, weights per block].

It writes into out. Both are contiguous.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """How GGUF stores tensors of one type."""

    name: str
    num_weights: int  # per block
    num_bytes: int  # per block
    unpack: Unpack
    plain: torch.dtype | None = None  # set if the file holds the numbers themselves, in this type

    def count_bytes(self, num_weights: int) -> int:
        """Returns the bytes that `num_weights` weights take in the file. They must fill whole blocks (not checked)."""
        return num_weights // self.num_weights * self.num_bytes


FORMATS: dict[int, BlockFormat] = {}  # by GGUF's number of the type


def _register_format(number: int, num_weights: int, num_bytes: int) -> Callable[[Unpack], Unpack]:
    """Returns a decorator that adds an unpacking function to FORMATS, under `number`, GGUF's number of the format.

    A block of the format has `num_weights` weights in `num_bytes` bytes. The function's name in capitals names the
    format.
    """

    def register(unpack: Unpack) -> Unpack:
        """Adds the function to FORMATS and returns it unchanged."""
        name = unpack.__name__.upper()
        FORMATS[number] = BlockFormat(name=name, num_weights=num_weights, num_bytes=num_bytes, unpack=unpack)
        return unpack

    return register


def _register_plain_format(number: int, name: str, dtype: torch.dtype) -> None:
    """Adds an unquantised format to FORMATS, under GGUF's number of it: the file holds numbers of type `dtype`."""

    def unpack(blocks: Tensor, out: Tensor) -> None:
        """Copies the numbers into `out` as fp32."""
        out.copy_(blocks.view(dtype))

    FORMATS[number] = BlockFormat(name=name, num_weights=1, num_bytes=dtype.itemsize, unpack=unpack, plain=dtype)


_register_plain_format(0, "F32", torch.float32)
_register_plain_format(1, "F16", torch.float16)
_register_plain_format(30, "BF16", torch.bfloat16)


def _read_half(blocks: Tensor, offset: int) -> Tensor:
    """Returns the fp16 number at byte `offset` of each block, as fp32 [n, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _split_bits(packed: Tensor, bits: int) -> Tensor:
    """Cuts bytes [..., k] into fields of `bits` bits, the lowest first, and returns them as [..., 8 / bits, k].

    The first fields of all k bytes come first, then all second fields, and so on. `bits` is 1, 2 or 4.

    >>> _split_bits(torch.tensor([0x21, 0x43], dtype=torch.uint8), 4).tolist()
    [[1, 3], [2, 4]]
    """
    # Contiguous bytes make the work below several times as fast.
    packed = packed.contiguous()
    mask, last = (1 << bits) - 1, 8 - bits
    fields = [packed & mask, *((packed >> shift) & mask for shift in range(bits, last, bits)), packed >> last]
    return torch.stack(fields, dim=-2)


def _read_high_bits(blocks: Tensor, offset: int) -> Tensor:
    """Returns the fifth bits of the 32 weights of each block, as numbers 0 or 16, uint8 [n, 2, 16].

    They are stored in four bytes from byte `offset` of the block on: bit i belongs to weight i.
    """
    n = blocks.shape[0]
    return _split_bits(blocks[:, offset : offset + 4, None], 1).view(n, 2, 16) << 4


@_register_format(2, 32, 18)
def q4_0(blocks: Tensor, out: Tensor) -> None:
    """Unpacks Q4_0 blocks [n, 18] into `out` [n, 32]: a weight is scale * (q - 8).

    `scale` is the block's fp16 number, q the weight's 4 bits.
    """
    out.view(-1, 2, 16).copy_(_split_bits(blocks[:, 2:], 4))
    out.sub_(8).mul_(_read_half(blocks, 0))


@_register_format(3, 32, 20)
def q4_1(blocks: Tensor, out: Tensor) -> None:
    """Unpacks Q4_1 blocks [n, 20] into `out` [n, 32]: a weight is scale * q + low.

    `scale` and `low` are the block's fp16 numbers, q the weight's 4 bits.
    """
    out.view(-1, 2, 16).copy_(_split_bits(blocks[:, 4:], 4))
    out.mul_(_read_half(blocks, 0)).add_(_read_half(blocks, 2))


@_register_format(6, 32, 22)
def q5_0(blocks: Tensor, out: Tensor) -> None:
    """Unpacks Q5_0 blocks [n, 22] into `out` [n, 32]: a weight is scale * (q - 16).

    `scale` is the block's fp16 number, q the weight's 5 bits.
    """
    out.view(-1, 2, 16).copy_(_split_bits(blocks[:, 6:], 4) | _read_high_bits(blocks, 2))
    out.sub_(16).mul_(_read_half(blocks, 0))


@_register_format(7, 32, 24)
def q5_1(blocks: Tensor, out: Tensor) -> None:
    """Unpacks Q5_1 blocks [n, 24] into `out` [n, 32]: a weight is scale * q + low.

    `scale` and `low` are the block's fp16 numbers, q the weight's 5 bits.
    """
    out.view(-1, 2, 16).copy_(_split_bits(blocks[:, 8:], 4) | _read_high_bits(blocks, 4))
    out.mul_(_read_half(blocks, 0)).add_(_read_half(blocks, 2))


@_register_format(8, 32, 34)
def q8_0(blocks: Tensor, out: Tensor) -> None:
    """Unpacks Q8_0 blocks [n, 34] into `out` [n, 32]: a weight is scale * q.

    `scale` is the block's fp16 number, q the weight's signed 8-bit integer.
    """
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_read_half(blocks, 0))


@_register_format(10, 256, 84)
def q2_k(blocks: Tensor, out: Tensor) -> None:
    """Unpacks Q2_K blocks [n, 84] into `out` [n, 256]: a weight is scale * part's scale * q - low * part's low.

    `scale` and `low` are the block's fp16 numbers, q the weight's 2 bits. Each of 16 parts of 16 weights has a scale
    and a low of 4 bits.
    """
    out.view(-1, 2, 4, 32).copy_(_split_bits(blocks[:, 16:80].unflatten(1, (2, 32)), 2))
    scales = _split_bits(blocks[:, :16], 4).float()  # [n, 2, 16]
    _scale_and_shift(out, scales[:, 0] * _read_half(blocks, 80), scales[:, 1] * _read_half(blocks, 82))


@_register_format(11, 256, 110)
def q3_k(blocks: Tensor, out: Tensor) -> None:
    """Unpacks Q3_K blocks [n, 110] into `out` [n, 256]: a weight is scale * (part's scale - 32) * (q - 4).

    `scale` is the block's fp16 number, q the weight's 3 bits, of which the highest is stored separately. Each of 16
    parts of 16 weights has a scale of 6 bits.
    """
    n = blocks.shape[0]
    low = _split_bits(blocks[:, 32:96].unflatten(1, (2, 32)), 2)  # [n, 2, 4, 32]
    high = _split_bits(blocks[:, :32], 1).view(n, 2, 4, 32)
    out.view(-1, 2, 4, 32).copy_(low | (high << 2))
    # A scale has six bits: first come the low four bits of all sixteen scales, then the high two bits of all.
    scales = _split_bits(blocks[:, 96:104], 4).flatten(1) | (
        _split_bits(blocks[:, 104:108], 2).flatten(1) << 4
    )  # [n, 16]
    out.sub_(4).view(n, 16, 16).mul_((scales.float().sub_(32) * _read_half(blocks, 108))[..., None])


@_register_format(12, 256, 144)
def q4_k(blocks: Tensor, out: Tensor) -> None:
    """Unpacks Q4_K blocks [n, 144] into `out` [n, 256]: a weight is scale * part's scale * q - low * part's low.

    `scale` and `low` are the block's fp16 numbers, q the weight's 4 bits. Each of 8 parts of 32 weights has a scale and
    a low of 6 bits.
    """
    out.view(-1, 4, 2, 32).copy_(_split_bits(blocks[:, 16:].unflatten(1, (4, 32)), 4))
    _scale_and_shift(out, *_read_scales_and_lows(blocks))


@_register_format(13, 256, 176)
def q5_k(blocks: Tensor, out: Tensor) -> None:
    """Unpacks Q5_K blocks [n, 176] into `out` [n, 256]: a weight is scale * part's scale * q - low * part's low.

    `scale` and `low` are the block's fp16 numbers, q the weight's 5 bits, of which the highest is stored separately.
    Each of 8 parts of 32 weights has a scale and a low of 6 bits.
    """
    n = blocks.shape[0]
    low = _split_bits(blocks[:, 48:].unflatten(1, (4, 32)), 4).view(n, 8, 32)
    out.view(n, 8, 32).copy_(low | (_split_bits(blocks[:, 16:48], 1) << 4))
    _scale_and_shift(out, *_read_scales_and_lows(blocks))


@_register_format(14, 256, 210)
def q6_k(blocks: Tensor, out: Tensor) -> None:
    """Unpacks Q6_K blocks [n, 210] into `out` [n, 256]: a weight is scale * part's scale * (q - 32).

    `scale` is the block's fp16 number, q the weight's 6 bits, of which the high two are stored separately. Each of 16
    parts of 16 weights has a signed 8-bit scale.
    """
    n = blocks.shape[0]
    low = _split_bits(blocks[:, :128].unflatten(1, (2, 64)), 4).view(n, 2, 4, 32)
    high = _split_bits(blocks[:, 128:192].unflatten(1, (2, 32)), 2)
    out.view(n, 2, 4, 32).copy_(low | (high << 4))
    scales = blocks[:, 192:208].view(torch.int8).float() * _read_half(blocks, 208)
    out.sub_(32).view(n, 16, 16).mul_(scales[..., None])


def _read_scales_and_lows(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and the lows of the eight parts of each Q4_K or Q5_K block, as fp32 [n, 8] each.

    Both are multiplied by the fp16 number of the block that belongs to them.
    """
    # Six bits each, in twelve bytes. The first four scales and lows lie in the low bits of the first eight bytes. The
    # other four have four bits in the last four bytes, and two bits at the top of the first eight.
    first, second, rest = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 2) & 48)], dim=1)
    lows = torch.cat([second & 63, (rest >> 4) | ((second >> 2) & 48)], dim=1)
    return scales.float() * _read_half(blocks, 0), lows.float() * _read_half(blocks, 2)


def _scale_and_shift(out: Tensor, scales: Tensor, lows: Tensor) -> None:
    """Changes `out` [n, weights per block] in place to out * scale - low.

    `scales` and `lows` [n, parts] have one number for each of the equal parts that a block is divided into.
    """
    parts = out.view(*scales.shape, -1)
    parts.mul_(scales[..., None]).sub_(lows[..., None])
