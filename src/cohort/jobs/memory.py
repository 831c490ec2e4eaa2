"""The plan of GPU memory that all ranks of a run agree on, and what they divide among them."""

from __future__ import annotations

from dataclasses import replace

import torch

from cohort.config.schema import LearnerConfig
from cohort.errors import ConfigError
from cohort.learner.plan import MemoryDemand, MemoryPlan, choose_shard, plan_memory
from cohort.models.device import available_bytes
from cohort.ranks.agree import agree_on_errors
from cohort.ranks.environment import count_sharing_ranks
from cohort.ranks.join import count_gpus
from cohort.world import Grid

# From what takes the most memory to what takes the least.
SHARDS = ("none", "optimizer", "full")


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
    available = available_bytes(device, count_sharing_ranks(count_gpus()))
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


def check_room_beside(plan: MemoryPlan, share: float, total: int) -> None:
    """Raises ConfigError if an engine cannot have `share` of a GPU of `total` bytes while the learner does not train.

    Weights and optimizer stay where they are meanwhile. While the learner trains, such an engine sleeps.
    """
    room = plan.available - plan.state
    if share * total > room:
        gib = 2**30
        raise ConfigError(
            f"engine.memory = {share:g} is {share * total / gib:.1f} of the GPU's {total / gib:.1f} GiB, and training "
            f"keeps {plan.state / gib:.1f} of {plan.available / gib:.1f} free GiB for weights and optimizer: set "
            f"--engine.memory to at most {max(0, int(100 * room / total)) / 100:g}, or use a smaller model (--model)."
        )
