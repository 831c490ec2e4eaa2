"""The plan of GPU memory that all ranks of a run agree on, and what they divide among them."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from cohort.config.engines import EngineConfig, NativeEngine, ServedEngine
from cohort.config.schema import LearnerConfig
from cohort.errors import ConfigError
from cohort.learner.plan import MemoryDemand, MemoryPlan, choose_shard, plan_memory
from cohort.models.device import available_bytes, limit_memory
from cohort.ranks.agree import agree_on_errors
from cohort.world import Grid

# From what takes the most memory to what takes the least.
SHARDS = ("none", "optimizer", "full")
# What an engine needs on a GPU besides its share of the memory: CUDA's context, and what weights pass through.
BESIDE_BYTES = 1 << 30

log = logging.getLogger(__name__)


def plan_ranks(
    demand: MemoryDemand | None, config: LearnerConfig, device: torch.device, grid: Grid
) -> tuple[MemoryPlan | None, LearnerConfig]:
    """Returns the plan of memory, the same on all ranks, and the settings with `shard` decided.

    `demand` is what one rank needs if nothing is divided; None = its shapes are not known. There is no plan on a CPU,
    where auto means none. Ranks may have different amounts of memory: the one with the least decides. Raises
    ConfigError if training does not fit.
    """
    if demand is None or device.type != "cuda":
        return None, replace(config, shard="none" if config.shard == "auto" else config.shard)
    demand = replace(demand, ranks=grid.data.size, tensor=grid.tensor.size)
    available = available_bytes(device)
    budget = config.token_budget
    shard = "none" if config.shard == "auto" else config.shard
    if config.shard == "auto" and grid.data.size > 1 and grid.tensor.size == 1:
        chosen = agree_on_errors(grid.whole, lambda: choose_shard(demand, available, budget))
        shard = max(grid.whole.gather(chosen), key=SHARDS.index)
    plan = agree_on_errors(grid.whole, lambda: plan_memory(replace(demand, shard=shard), available, budget))
    plans = grid.whole.gather([plan.token_budget, plan.recompute, plan.keep_kv])
    agreed = replace(
        plan,
        token_budget=min(one[0] for one in plans),
        recompute=any(one[1] for one in plans),
        keep_kv=all(one[2] for one in plans),
    )
    return agreed, replace(config, shard=shard)


def is_elsewhere(engine: EngineConfig) -> bool:
    """Returns whether an engine is not in the process that trains."""
    if isinstance(engine, NativeEngine):
        return engine.place == "process"
    return isinstance(engine, ServedEngine) and engine.is_served


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
