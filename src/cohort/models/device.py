"""Where a run computes and in which type, decided from what is asked and what is there."""

from __future__ import annotations

from typing import Literal

import torch

from cohort.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def find_device(asked: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda"."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device cuda: torch {torch.__version__} sees no CUDA device here; use --device cpu.")
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


Dtype = Literal["auto", "float32", "bfloat16", "float64"]


def available_bytes(device: torch.device) -> int:
    """Of a GPU's memory: what is free, and what this process holds."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def find_dtype(asked: Dtype, device: torch.device) -> Dtype:
    """The name of the compute type. bf16 is slow on CPUs, and GPUs before compute capability 8 do not have it."""
    if asked != "auto":
        return asked
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return "bfloat16" if able else "float32"
