"""NF4, the 4-bit number format of QLoRA (arXiv:2305.14314), with doubly quantised scales.

The bits are the same as those of the library bitsandbytes. A matrix is cut into blocks of 64 entries, in the order of
memory. Each entry is divided by the largest magnitude in its block (the scale) and rounded to the nearest of 16 values.
Normally distributed entries use these values about equally often.

The scales themselves are stored in 8 bits. Their mean is subtracted, the rest is cut into blocks of 256, each block is
divided by its largest magnitude (the peak), and each result is rounded to the nearest of 256 values. In total an entry
takes 4.127 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # entries per scale
SCALES = 256  # scales per peak
PIECE = 1 << 24  # entries that are held in fp32 at one time: 64 MiB

# The 16 values: quantiles of the normal distribution, scaled to [-1, 1], with an exact zero (appendix E of the paper).
# fmt: off
CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class QuantisedMatrix:
    """A matrix in NF4. Its last block is padded with zeros."""

    codes: Tensor  # [blocks, 32] uint8: two entries per byte, the first in the upper half
    scales: Tensor  # [blocks] uint8: indices of the 256 values
    peaks: Tensor  # [blocks / 256, rounded up] fp32
    mean: Tensor  # [] fp32, mean of the scales
    num_columns: int
    dtype: torch.dtype  # of the original matrix

    @property
    def num_bytes(self) -> int:
        """The memory that codes, scales, peaks and mean take, in bytes."""
        return sum(t.nbytes for t in (self.codes, self.scales, self.peaks, self.mean))

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Returns rows `start` to `stop` (exclusive) of the matrix, [stop - start, columns], dequantised.

        They have the type of the original matrix.
        """
        first, last = start * self.num_columns, stop * self.num_columns
        # The blocks that these entries lie in: rows need not begin or end at the edge of a block.
        low, high = first // BLOCK, -(-last // BLOCK)
        scales = make_dynamic_code(self.scales.device)[self.scales[low:high].int()]
        peaks = self.peaks[torch.arange(low, high, device=scales.device) // SCALES]
        scales = scales * peaks + self.mean
        pairs = self.codes[low:high]
        entries = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten(1)  # [blocks, 64]
        values = make_normal_code(scales.device)[entries.int()] * scales[:, None]
        return values.flatten()[first - low * BLOCK : last - low * BLOCK].view(-1, self.num_columns).to(self.dtype)


def quantise(matrix: Tensor) -> QuantisedMatrix:
    """Returns a quantised copy, in 4 bits per entry (NF4), of a matrix [rows, columns] of any floating-point type.

    It works piece by piece, so that no fp32 copy of the whole matrix exists.
    """
    pieces = [_quantise_blocks(piece) for piece in matrix.flatten().split(PIECE)]
    scales = torch.cat([scale for _, scale in pieces])  # [blocks]
    mean = scales.mean()
    grouped = F.pad(scales - mean, (0, -len(scales) % SCALES)).view(-1, SCALES)
    peaks = grouped.abs().amax(dim=-1)
    return QuantisedMatrix(
        codes=torch.cat([codes for codes, _ in pieces]),
        scales=_find_nearest(_divide_by_scales(grouped, peaks), make_dynamic_code(matrix.device)).flatten()[
            : len(scales)
        ],
        peaks=peaks,
        mean=mean,
        num_columns=matrix.shape[1],
        dtype=matrix.dtype,
    )


def _quantise_blocks(entries: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes [blocks, 32] and the fp32 scales [blocks] of n consecutive entries of a matrix.

    A block is 64 entries, the last one padded with zeros. A code is a byte with two entries of 4 bits.
    """
    blocks = F.pad(entries.float(), (0, -len(entries) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=-1)
    codes = _find_nearest(_divide_by_scales(blocks, scales), make_normal_code(blocks.device))
    return codes[:, ::2] << 4 | codes[:, 1::2], scales


def _divide_by_scales(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns `blocks` [n, entries] with each row divided by its scale of `scales` [n], and cut to [-1, 1].

    A row of zeros stays zero.
    """
    # The lower bound avoids a division by zero.
    return (blocks * (1.0 / scales.clamp(min=1e-38))[:, None]).clamp_(-1, 1)


def _find_nearest(values: Tensor, code: Tensor) -> Tensor:
    """Returns, for each of `values`, the index of the nearest number in the sorted vector `code`, as uint8.

    Halfway between two numbers, it is the index of the lower one.
    """
    return torch.bucketize(values, (code[:-1] + code[1:]) / 2, out_int32=True).to(torch.uint8)


@cache
def make_normal_code(device: torch.device) -> Tensor:
    """Returns the 16 numbers that a 4-bit entry can stand for, sorted, in fp32.

    The tensor is made once per device and shared by all callers, so it must not be changed.
    """
    return torch.tensor(CODE, dtype=torch.float32, device=device)


@cache
def make_dynamic_code(device: torch.device) -> Tensor:
    """Returns the 256 numbers that an 8-bit scale can stand for, sorted, in fp32.

    They are 0, 1, and of each sign 2^i numbers between 10^(i - 7) and 10^(i - 6), for i from 0 to 6 (arXiv:1511.04561).
    The tensor is made once per device and shared by all callers, so it must not be changed.
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        means = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)
