"""The plan of GPU memory that ranks agree on. No GPU is needed: its size is made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cohort.config.engines import EngineConfig, NativeEngine, ServerEngine, SglangEngine, VllmEngine
from cohort.config.schema import LearnerConfig
from cohort.errors import AgreedError, ConfigError
from cohort.jobs import memory
from cohort.jobs.memory import BESIDE_BYTES, find_room, is_elsewhere, leave_room, plan_ranks
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
    monkeypatch: pytest.MonkeyPatch, gib: float, size: int, shard: str = "auto", others: list[Any] | None = None
) -> tuple[Any, str]:
    """Returns the plan for GPUs of a size, and what is divided."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: int(gib * GIB))
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


def test_there_is_no_plan_without_a_gpu_or_without_shapes() -> None:
    for demand, device in ((DEMAND, torch.device("cpu")), (None, GPU)):
        for shard, expected in (("auto", "none"), ("full", "full")):
            config = LearnerConfig(shard=shard)  # type: ignore[arg-type]
            assert plan_ranks(demand, config, device, ONE_PROCESS.split(1)) == (None, LearnerConfig(shard=expected))


# ---- engines on the learner's GPU

OWN = ("cuda:0",)


def test_the_learner_has_what_engines_on_its_gpu_leave() -> None:
    assert find_room(70 * GIB, 80 * GIB, 1, 0.5) == 30 * GIB - BESIDE_BYTES
    assert find_room(80 * GIB, 80 * GIB, 2, 0.25) == 40 * GIB - 2 * BESIDE_BYTES
    with pytest.raises(ConfigError, match=r"engine\.memory = 0\.4 leaves nothing .* with 3 engines"):
        find_room(80 * GIB, 80 * GIB, 3, 0.4)


@pytest.mark.parametrize(
    ("engine", "share"),
    [
        (NativeEngine(place="process", devices=OWN, memory=0.25), 0.75 - 1 / 80),
        (NativeEngine(place="process", devices=("cuda:1", "cuda:0", "cuda:0"), replicas=3, memory=0.25), 0.5 - 2 / 80),
        (VllmEngine(place="server", devices=OWN), 0.2 - 1 / 80),
        (SglangEngine(devices=OWN, memory=0.5), 0.5 - 1 / 80),
        (NativeEngine(place="process", devices=("cuda:1",)), None),
        (NativeEngine(), None),
        (VllmEngine(memory=0.5), None),
        (ServerEngine(), None),
    ],
)
def test_what_torch_takes_is_limited_where_engines_are(
    monkeypatch: pytest.MonkeyPatch, engine: EngineConfig, share: float | None
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(memory, "available_bytes", lambda device: 80 * GIB)
    monkeypatch.setattr(memory, "limit_memory", lambda device, given: limits.append(given))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    leave_room(engine, GPU)
    leave_room(engine, torch.device("cpu"))
    assert limits == ([] if share is None else [pytest.approx(share)])


def test_engines_that_are_elsewhere() -> None:
    assert [is_elsewhere(NativeEngine(place=place)) for place in ("here", "process")] == [False, True]  # type: ignore[arg-type]
    assert [is_elsewhere(VllmEngine(place=place)) for place in ("here", "server")] == [False, True]  # type: ignore[arg-type]
    assert is_elsewhere(SglangEngine()) and not is_elsewhere(ServerEngine())
