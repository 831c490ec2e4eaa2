"""Choice of the device and the number type for a run, from the settings and the hardware."""

from __future__ import annotations

from typing import Literal

import torch

from cohort.errors import ConfigError
from cohort.system.kernel import find_free_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def choose_device(asked: str) -> torch.device:
    """Returns the device for "auto", "cpu" or "cuda". "auto" is the current GPU where there is one, else the CPU.

    "cuda" is the current GPU. Raises ConfigError for "cuda" where torch sees no GPU.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device is cuda, but torch {torch.__version__} sees no CUDA device here; use --device cpu. "
            "A run that was started with cuda can only be resumed on a machine with a GPU."
        )
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


Dtype = Literal["auto", "float32", "bfloat16", "float64"]


def available_bytes(device: torch.device, processes: int = 1) -> int:
    """Returns the bytes of memory of the GPU `device` that are free or reserved by torch in this process.

    Reserved memory includes what existing tensors use. Of free memory this process gets its part, if so many
    `processes` train on the GPU. It is no more than this process may use (`limit_memory`).
    """
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(int(limit), free // processes + torch.cuda.memory_reserved(device))


def limit_memory(device: torch.device, share: float) -> None:
    """Limits what torch takes of a GPU's memory in this process to a share of all that it has. 1 = no limit."""
    torch.cuda.set_per_process_memory_fraction(float(share), device)


def measure_total_bytes(device: torch.device) -> int:
    """Returns the bytes of memory that the GPU `device` has."""
    return torch.cuda.mem_get_info(device)[1]


def measure_free_bytes(device: torch.device) -> int | None:
    """Returns the bytes that new tensors can take on a device; None if the system does not tell."""
    if device.type != "cuda":
        return find_free_memory()
    # Memory of freed tensors stays reserved by torch and can be used again.
    return available_bytes(device) - torch.cuda.memory_allocated(device)


def choose_dtype(asked: Dtype, device: torch.device) -> Dtype:
    """Returns the name of the number type to compute with: `asked` unchanged, unless it is "auto".

    For "auto": "bfloat16" on GPUs of compute capability 8.0 and up, which compute it fast, else "float32".
    """
    if asked != "auto":
        return asked
    # bf16 is slow on CPUs, and GPUs before compute capability 8 do not have it.
    has_fast_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return "bfloat16" if has_fast_bf16 else "float32"
