"""From the host to a device, without waiting for what already runs there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def put(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of these values, on its way to the device. Ordinary memory would be copied after everything queued."""
    here = torch.as_tensor(values, dtype=dtype)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)
