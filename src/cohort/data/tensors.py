"""Tensors as records of plain arrays, so that weights and optimizer states can be sent between processes."""

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
    """A tensor's bytes on the host. Bytes serve every type: numpy has no bfloat16."""

    dtype: str  # torch's name, such as "bfloat16"
    shape: list[int]
    data: NDArray[np.uint8]


def tensors_to_records(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, PlainTensor]:
    """Returns a serialisable record per (name, tensor), by name. The data is a copy in host memory."""
    return {name: _tensor_to_record(tensor) for name, tensor in tensors}


def _tensor_to_record(tensor: Tensor) -> PlainTensor:
    """Returns a serialisable record with a tensor's type, shape and a copy of its bytes."""
    on_host = tensor.detach().to("cpu", copy=True).contiguous()
    dtype = str(on_host.dtype).removeprefix("torch.")
    return PlainTensor(dtype=dtype, shape=list(on_host.shape), data=on_host.flatten().view(torch.uint8).numpy())


def tensor_from_record(plain: PlainTensor) -> Tensor:
    """Returns a new tensor in host memory, equal bit for bit to the one that the record was made from.

    It shares no memory with the record.
    """
    tensor = torch.empty(plain.shape, dtype=getattr(torch, plain.dtype))
    tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(plain.data))
    return tensor


def tensors_from_records(plain: dict[str, PlainTensor]) -> dict[str, Tensor]:
    """Returns new tensors in host memory from the records of `tensors_to_records`, by name."""
    return {name: tensor_from_record(one) for name, one in plain.items()}
