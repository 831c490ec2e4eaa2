"""The block formats of GGUF as arithmetic on tensors: packed bytes in, the fp32 weights they stand for out.

A block is a row of bytes: some scales and a few bits for each of its weights. Each function takes many blocks and
writes their weights. Every product and sum is rounded on its own, in the reference's order, so that the values are
those of the `gguf` package, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Unpack = Callable[[Tensor, Tensor], None]
"""unpack(blocks uint8 [n, bytes of a block], out float32 [n, weights of a block]); both contiguous"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """How a type of tensor is stored."""

    name: str
    num_weights: int  # of a block
    num_bytes: int
    unpack: Unpack
    plain: torch.dtype | None = None  # set where the file holds the numbers themselves

    def size(self, num_weights: int) -> int:
        """Bytes of that many weights, which fill whole blocks."""
        return num_weights // self.num_weights * self.num_bytes


FORMATS: dict[int, Format] = {}  # by the number GGUF gives the type


def _format(number: int, num_weights: int, num_bytes: int) -> Callable[[Unpack], Unpack]:
    def register(unpack: Unpack) -> Unpack:
        name = unpack.__name__.upper()
        FORMATS[number] = Format(name=name, num_weights=num_weights, num_bytes=num_bytes, unpack=unpack)
        return unpack

    return register


def _plain(number: int, name: str, dtype: torch.dtype) -> None:
    def unpack(blocks: Tensor, out: Tensor) -> None:
        out.copy_(blocks.view(dtype))

    FORMATS[number] = Format(name=name, num_weights=1, num_bytes=dtype.itemsize, unpack=unpack, plain=dtype)


_plain(0, "F32", torch.float32)
_plain(1, "F16", torch.float16)
_plain(30, "BF16", torch.bfloat16)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at a byte of each block, as fp32. # [n, 1]"""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(packed: Tensor, bits: int) -> Tensor:
    """Bytes cut into fields, the lowest bits first: the first field of all k, then the second. # [..., 8 / bits, k]

    >>> _fields(torch.tensor([0x21, 0x43], dtype=torch.uint8), 4).tolist()
    [[1, 3], [2, 4]]
    """
    packed = packed.contiguous()  # the work below is then one run over memory, several times as fast
    mask, last = (1 << bits) - 1, 8 - bits
    fields = [packed & mask, *((packed >> shift) & mask for shift in range(bits, last, bits)), packed >> last]
    return torch.stack(fields, dim=-2)


def _high_bits(blocks: Tensor, at: int) -> Tensor:
    """The fifth bit of 32 weights, at its place: bit i of the four bytes belongs to weight i. # [n, 2, 16]"""
    n = blocks.shape[0]
    return _fields(blocks[:, at : at + 4, None], 1).view(n, 2, 16) << 4


@_format(2, 32, 18)
def q4_0(blocks: Tensor, out: Tensor) -> None:
    """scale * (q - 8)"""
    out.view(-1, 2, 16).copy_(_fields(blocks[:, 2:], 4))
    out.sub_(8).mul_(_half(blocks, 0))


@_format(3, 32, 20)
def q4_1(blocks: Tensor, out: Tensor) -> None:
    """scale * q + low"""
    out.view(-1, 2, 16).copy_(_fields(blocks[:, 4:], 4))
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


@_format(6, 32, 22)
def q5_0(blocks: Tensor, out: Tensor) -> None:
    """scale * (q - 16)"""
    out.view(-1, 2, 16).copy_(_fields(blocks[:, 6:], 4) | _high_bits(blocks, 2))
    out.sub_(16).mul_(_half(blocks, 0))


@_format(7, 32, 24)
def q5_1(blocks: Tensor, out: Tensor) -> None:
    """scale * q + low"""
    out.view(-1, 2, 16).copy_(_fields(blocks[:, 8:], 4) | _high_bits(blocks, 4))
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


@_format(8, 32, 34)
def q8_0(blocks: Tensor, out: Tensor) -> None:
    """scale * q"""
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


@_format(10, 256, 84)
def q2_k(blocks: Tensor, out: Tensor) -> None:
    """16 parts of 16 weights: scale * part's scale * q - low * part's low"""
    out.view(-1, 2, 4, 32).copy_(_fields(blocks[:, 16:80].unflatten(1, (2, 32)), 2))
    scales = _fields(blocks[:, :16], 4).float()  # [n, 2, 16]
    _scale_and_shift(out, scales[:, 0] * _half(blocks, 80), scales[:, 1] * _half(blocks, 82))


@_format(11, 256, 110)
def q3_k(blocks: Tensor, out: Tensor) -> None:
    """16 parts of 16 weights: scale * (part's scale - 32) * (q - 4), the third bit of q kept apart"""
    n = blocks.shape[0]
    low = _fields(blocks[:, 32:96].unflatten(1, (2, 32)), 2)  # [n, 2, 4, 32]
    high = _fields(blocks[:, :32], 1).view(n, 2, 4, 32)
    out.view(-1, 2, 4, 32).copy_(low | (high << 2))
    # six bits a scale: four of all sixteen first, then two of each
    scales = _fields(blocks[:, 96:104], 4).flatten(1) | (_fields(blocks[:, 104:108], 2).flatten(1) << 4)  # [n, 16]
    out.sub_(4).view(n, 16, 16).mul_((scales.float().sub_(32) * _half(blocks, 108))[..., None])


@_format(12, 256, 144)
def q4_k(blocks: Tensor, out: Tensor) -> None:
    """8 parts of 32 weights: scale * part's scale * q - low * part's low"""
    out.view(-1, 4, 2, 32).copy_(_fields(blocks[:, 16:].unflatten(1, (4, 32)), 4))
    _scale_and_shift(out, *_six_bits(blocks))


@_format(13, 256, 176)
def q5_k(blocks: Tensor, out: Tensor) -> None:
    """As Q4_K, the fifth bit of q kept apart."""
    n = blocks.shape[0]
    low = _fields(blocks[:, 48:].unflatten(1, (4, 32)), 4).view(n, 8, 32)
    out.view(n, 8, 32).copy_(low | (_fields(blocks[:, 16:48], 1) << 4))
    _scale_and_shift(out, *_six_bits(blocks))


@_format(14, 256, 210)
def q6_k(blocks: Tensor, out: Tensor) -> None:
    """16 parts of 16 weights: scale * part's scale * (q - 32), the two high bits of q kept apart"""
    n = blocks.shape[0]
    low = _fields(blocks[:, :128].unflatten(1, (2, 64)), 4).view(n, 2, 4, 32)
    high = _fields(blocks[:, 128:192].unflatten(1, (2, 32)), 2)
    out.view(n, 2, 4, 32).copy_(low | (high << 4))
    scales = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    out.sub_(32).view(n, 16, 16).mul_(scales[..., None])


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and lows of the eight parts of Q4_K and Q5_K, six bits each, in twelve bytes. # [n, 8] each"""
    first, second, rest = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 2) & 48)], dim=1)
    lows = torch.cat([second & 63, (rest >> 4) | ((second >> 2) & 48)], dim=1)
    return scales.float() * _half(blocks, 0), lows.float() * _half(blocks, 2)


def _scale_and_shift(out: Tensor, scales: Tensor, lows: Tensor) -> None:
    """out * scale - low, in place, a scale and a low for each part of a block. # scales, lows [n, parts]"""
    parts = out.view(*scales.shape, -1)
    parts.mul_(scales[..., None]).sub_(lows[..., None])
