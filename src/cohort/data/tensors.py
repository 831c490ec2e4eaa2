"""Tensors as plain arrays, so that they can travel: weights and optimizer states between processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cohort.serialize import record


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class PlainTensor:
    """A tensor's bytes on the host, whatever its type: numpy knows no bfloat16."""

    dtype: str  # as torch calls it: "bfloat16"
    shape: list[int]
    data: NDArray[np.uint8]


def as_plain(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, PlainTensor]:
    """Named tensors, copied to the host."""
    return {name: _plain(tensor) for name, tensor in tensors}


def _plain(tensor: Tensor) -> PlainTensor:
    here = tensor.detach().to("cpu", copy=True).contiguous()
    dtype = str(here.dtype).removeprefix("torch.")
    return PlainTensor(dtype=dtype, shape=list(here.shape), data=here.flatten().view(torch.uint8).numpy())


def as_tensor(plain: PlainTensor) -> Tensor:
    """The tensor again, on the host, bit for bit."""
    tensor = torch.empty(plain.shape, dtype=getattr(torch, plain.dtype))
    tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(plain.data))
    return tensor


def as_tensors(plain: dict[str, PlainTensor]) -> dict[str, Tensor]:
    """Named tensors again."""
    return {name: as_tensor(one) for name, one in plain.items()}
