"""NF4, the 4-bit numbers of QLoRA (arXiv:2305.14314), with doubly quantised scales; the bits are bitsandbytes'.

A matrix is cut into blocks of 64 entries, in the order they lie in memory. An entry is divided by the largest
magnitude of its block, the scale, and rounded to the nearest of 16 values that a normal distribution fills evenly.
Scales are kept in 8 bits: less their mean, in blocks of 256 divided by the largest magnitude, each rounded to the
nearest of 256 values. In all 4.127 bits an entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # entries under one scale
SCALES = 256  # scales under one peak
PIECE = 1 << 24  # entries that are fp32 at one time: 64 MiB

# Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero (appendix E of the paper).
# fmt: off
CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """A matrix in NF4. Its last block is filled up with zeros."""

    codes: Tensor  # [blocks, 32] uint8: two entries a byte, the first in the upper half
    scales: Tensor  # [blocks] uint8
    peaks: Tensor  # [blocks / 256, rounded up] fp32
    mean: Tensor  # [] fp32, of the scales
    num_columns: int
    dtype: torch.dtype  # of the matrix

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.peaks, self.mean))

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows of the matrix again, rounded to its type: [stop - start, columns]."""
        first, last = start * self.num_columns, stop * self.num_columns
        low, high = first // BLOCK, -(-last // BLOCK)
        scales = dynamic_code(self.scales.device)[self.scales[low:high].int()]
        peaks = self.peaks[torch.arange(low, high, device=scales.device) // SCALES]
        scales = scales * peaks + self.mean
        pairs = self.codes[low:high]
        entries = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten(1)  # [blocks, 64]
        values = normal_code(scales.device)[entries.int()] * scales[:, None]
        return values.flatten()[first - low * BLOCK : last - low * BLOCK].view(-1, self.num_columns).to(self.dtype)


def quantise(matrix: Tensor) -> Quantised:
    """[rows, columns] in any type, piece by piece: no fp32 copy of the whole exists."""
    pieces = [_blocks(piece) for piece in matrix.flatten().split(PIECE)]
    scales = torch.cat([scale for _, scale in pieces])  # [blocks]
    mean = scales.mean()
    grouped = F.pad(scales - mean, (0, -len(scales) % SCALES)).view(-1, SCALES)
    peaks = grouped.abs().amax(dim=-1)
    return Quantised(
        codes=torch.cat([codes for codes, _ in pieces]),
        scales=_nearest(_scaled(grouped, peaks), dynamic_code(matrix.device)).flatten()[: len(scales)],
        peaks=peaks,
        mean=mean,
        num_columns=matrix.shape[1],
        dtype=matrix.dtype,
    )


def _blocks(entries: Tensor) -> tuple[Tensor, Tensor]:
    """codes [blocks, 32] and scales [blocks] of a piece [n]."""
    blocks = F.pad(entries.float(), (0, -len(entries) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=-1)
    codes = _nearest(_scaled(blocks, scales), normal_code(blocks.device))
    return codes[:, ::2] << 4 | codes[:, 1::2], scales


def _scaled(blocks: Tensor, scales: Tensor) -> Tensor:
    """Each row divided by its scale; zeros stay zeros."""
    return (blocks * (1.0 / scales.clamp(min=1e-38))[:, None]).clamp_(-1, 1)


def _nearest(values: Tensor, code: Tensor) -> Tensor:
    """The index of the nearest number of a sorted code, as uint8."""
    return torch.bucketize(values, (code[:-1] + code[1:]) / 2, out_int32=True).to(torch.uint8)


@cache
def normal_code(device: torch.device) -> Tensor:
    return torch.tensor(CODE, dtype=torch.float32, device=device)


@cache
def dynamic_code(device: torch.device) -> Tensor:
    """256 numbers of either sign, 2^i of each in the i-th of seven decades below 1 (arXiv:1511.04561); 0; 1."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        means = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)
