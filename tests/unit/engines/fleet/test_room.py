"""The memory of a GPU that a learner shares with engines in other processes. No GPU is needed: its size is made up."""

from __future__ import annotations

import pytest
import torch

from cohort.config.engines import EngineConfig, NativeEngine, ServerEngine, SglangEngine, VllmEngine
from cohort.engines.fleet import room
from cohort.engines.fleet.room import BESIDE_BYTES, find_room, is_elsewhere, leave_room
from cohort.errors import ConfigError

GIB = 2**30
GPU = torch.device("cuda", 0)
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
    monkeypatch.setattr(room, "available_bytes", lambda device: 80 * GIB)
    monkeypatch.setattr(room, "limit_memory", lambda device, given: limits.append(given))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    leave_room(engine, GPU)
    leave_room(engine, torch.device("cpu"))
    assert limits == ([] if share is None else [pytest.approx(share)])


def test_engines_that_are_elsewhere() -> None:
    assert [is_elsewhere(NativeEngine(place=place)) for place in ("here", "process")] == [False, True]  # type: ignore[arg-type]
    assert [is_elsewhere(VllmEngine(place=place)) for place in ("here", "server")] == [False, True]  # type: ignore[arg-type]
    assert is_elsewhere(SglangEngine()) and not is_elsewhere(ServerEngine())
