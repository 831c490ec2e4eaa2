"""Copies from the host to a device that do not wait for work already queued there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def copy_to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor of these values (array, list or tensor) on the device; `dtype` None = the type of the values.

    The values must be in host memory. On a CPU the tensor may share memory with them. On a GPU the copy may still be
    under way: work that is queued there later waits for it, the host does not.
    """
    on_host = torch.as_tensor(values, dtype=dtype)
    # With pinned memory the host does not wait. From ordinary memory the copy would wait for everything queued before.
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host.to(device)


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies of the tensors in host memory, by name."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
