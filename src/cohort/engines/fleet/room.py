"""Divides the memory of a learner's GPU between the learner and engines in other processes that are there too."""

from __future__ import annotations

import logging

import torch

from cohort.config.engines import EngineConfig, NativeEngine, ServedEngine
from cohort.errors import ConfigError
from cohort.models.device import available_bytes, limit_memory

# What an engine needs on a GPU besides its share of the memory: CUDA's context, and what weights pass through.
BESIDE_BYTES = 1 << 30

log = logging.getLogger(__name__)


def is_elsewhere(engine: EngineConfig) -> bool:
    """Returns whether an engine is not in the process that trains."""
    if isinstance(engine, NativeEngine):
        return engine.place == "process"
    return isinstance(engine, ServedEngine) and engine.is_served


def has_given_servers(engine: EngineConfig) -> bool:
    """Returns whether an engine is made of servers that the user has started."""
    return isinstance(engine, ServedEngine) and bool(engine.urls)


def leave_room(engine: EngineConfig, device: torch.device) -> None:
    """Limits the memory that the learner takes of its GPU to what the engines of the run that are there leave.

    Without such engines it does nothing. Raises ConfigError if they leave nothing.
    """
    if not isinstance(engine, NativeEngine | ServedEngine) or not is_elsewhere(engine) or device.type != "cuda":
        return
    num = engine.devices.count(str(device))
    if num:
        _, total = torch.cuda.mem_get_info(device)
        room = find_room(available_bytes(device), total, num, engine.memory)
        limit_memory(device, room / total)
        log.info(
            "engines on the learner's GPU get %.0f%% of its memory (--engine.memory), and the learner %.1f GiB",
            100 * num * engine.memory,
            room / 2**30,
        )


def find_room(available: int, total: int, num: int, share: float) -> int:
    """Returns the bytes of a GPU that are left for a learner beside `num` engines, which get a share of `total` each.

    `available` are those that it would have alone. Raises ConfigError if nothing is left.
    """
    room = available - num * int(share * total + BESIDE_BYTES)
    if room <= 0:
        raise ConfigError(
            f"engine.memory = {share:g} leaves nothing of the GPU for the learner, which shares it with {num} engines: "
            "lower it, or name other GPUs (--engine.devices)."
        )
    return room
