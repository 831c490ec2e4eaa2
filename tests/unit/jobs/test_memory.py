"""The plan of GPU memory that ranks agree on. No GPU is needed: its size is made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cohort.config.schema import LearnerConfig
from cohort.errors import AgreedError, ConfigError
from cohort.jobs import memory
from cohort.jobs.memory import check_room_beside, plan_ranks
from cohort.learner.plan import MemoryDemand
from cohort.models.shapes import find_shape
from cohort.world import ONE_PROCESS, Grid, World

GIB = 2**30
GPU = torch.device("cuda", 0)
DEMAND = MemoryDemand(
    model=find_shape("qwen2.5-7b"), bytes_per_number=2, longest=1536, batch_tokens=70_000, kv_tokens=70_000
)


class PretendRanks(World):
    """The first of several ranks. The others say the same, except where `others` has what they say instead."""

    def __init__(self, size: int, others: list[Any] | None = None) -> None:
        super().__init__()
        self.size = size
        self.others = others or []

    def gather(self, value: Any) -> list[Any]:
        # An empty text says that there was no error.
        instead = [other for other in self.others if value and type(other) is type(value)]
        return [value, *(instead or [value] * (self.size - 1))]


def plan(
    monkeypatch: pytest.MonkeyPatch,
    gib: float,
    size: int,
    shard: str = "auto",
    others: list[Any] | None = None,
    gpus: int = 8,
) -> tuple[Any, str]:
    """Returns the plan for GPUs of a size, and what is divided. The machine has `gpus` of them."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setattr(memory, "count_gpus", lambda: gpus)
    monkeypatch.setattr(memory, "available_bytes", lambda device, processes: int(gib * GIB) // processes)
    ranks = PretendRanks(size, others)
    config = LearnerConfig(shard=shard)  # type: ignore[arg-type]
    found, settings = plan_ranks(DEMAND, config, GPU, Grid(whole=ranks, data=ranks, tensor=ONE_PROCESS))
    return found, settings.shard


def test_less_memory_divides_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [plan(monkeypatch, gib, 8)[1] for gib in (200, 80, 55)] == ["none", "optimizer", "full"]
    with pytest.raises(AgreedError, match="GiB are available"):
        plan(monkeypatch, 30, 8)
    # What is asked for is not changed, also where less would do.
    assert plan(monkeypatch, 200, 8, "full")[1] == "full"
    assert plan(monkeypatch, 200, 1)[1] == "none"


def test_the_rank_with_the_least_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = plan(monkeypatch, 200, 2, "optimizer")
    agreed, shard = plan(monkeypatch, 200, 2, "auto", others=["optimizer", [1536, True, False]])
    assert shard == "optimizer" and own.token_budget > 1536 and not own.recompute
    assert (agreed.token_budget, agreed.recompute, agreed.keep_kv) == (1536, True, False)


def test_ranks_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, share in ((2, 1), (1, 2)):
        assert plan(monkeypatch, 400, 2, "none", gpus=gpus)[0].available == 400 * GIB // share


def test_an_engine_beside_the_learner_must_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = plan(monkeypatch, 160, 1, "none")
    room = (160 * GIB - found.state) / (160 * GIB)
    assert 0.1 < room < 0.4
    check_room_beside(found, room - 0.01, 160 * GIB)
    with pytest.raises(ConfigError, match=f"set --engine.memory to at most {int(100 * room) / 100:g},"):
        check_room_beside(found, room + 0.01, 160 * GIB)


def test_there_is_no_plan_without_a_gpu_or_without_shapes() -> None:
    for demand, device in ((DEMAND, torch.device("cpu")), (None, GPU)):
        for shard, expected in (("auto", "none"), ("full", "full")):
            config = LearnerConfig(shard=shard)  # type: ignore[arg-type]
            assert plan_ranks(demand, config, device, ONE_PROCESS.split(1)) == (None, LearnerConfig(shard=expected))
