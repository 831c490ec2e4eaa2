"""Where a run computes: decided once, recorded, refused where it cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cohort.config.rollout import RolloutConfig
from cohort.config.schema import LearnerConfig, NativeEngine
from cohort.errors import ConfigError
from cohort.jobs import build
from cohort.models.device import find_device, find_dtype
from cohort.recipes.tiny import quickstart


@pytest.fixture
def gpu(monkeypatch):
    """A device of compute capability 9, as far as anybody looks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settled = build.settled(quickstart())
    assert (settled.device, settled.learner.dtype) == ("cpu", "float32")
    assert settled.rollout.order == "rounds"
    assert find_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="sees no CUDA device here; use --device cpu"):
        build.settled(replace(quickstart(), device="cuda"))


def test_with_a_gpu(gpu, monkeypatch):
    settled = build.settled(quickstart())
    assert (settled.device, settled.learner.dtype) == ("cuda", "bfloat16")
    assert settled.rollout.order == "continuous"
    asked = replace(quickstart(), rollout=RolloutConfig(order="rounds"))
    assert build.settled(asked).rollout.order == "rounds", "a choice, or that of an older run, stays"
    assert build.settled(settled) == settled, "what was decided once stays"
    chosen = build.settled(replace(quickstart(), device="cpu"))
    assert (chosen.device, chosen.learner.dtype) == ("cpu", "float32")
    exact = build.settled(replace(quickstart(), learner=LearnerConfig(dtype="float32")))
    assert (exact.device, exact.learner.dtype) == ("cuda", "float32")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert find_dtype("auto", find_device("auto")) == "float32", "no bf16 before compute capability 8"


def test_copies_of_weights_for_a_cpu_are_not_made_on_a_gpu(gpu):
    packed = replace(quickstart(), engine=NativeEngine(weights="packed"))
    assert build.settled(packed).engine.weights == "shared"
    assert build.settled(replace(packed, device="cpu")).engine.weights == "packed"
    with pytest.raises(ConfigError, match=r"engine\.weights = packed is for CPUs: on a GPU drop it"):
        build.settled(replace(packed, device="cuda"))
