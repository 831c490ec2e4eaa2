"""Tests of the choice of device and type: it is made once, recorded in the config, and refused if impossible."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cohort.config.rollout import RolloutConfig
from cohort.config.schema import LearnerConfig, NativeEngine
from cohort.errors import ConfigError
from cohort.jobs import build
from cohort.models.device import choose_device, choose_dtype
from cohort.recipes.tiny import quickstart


@pytest.fixture
def gpu(monkeypatch):
    """Makes torch report a GPU of compute capability 9."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    resolved = build.resolve_machine_settings(quickstart())
    assert (resolved.device, resolved.learner.dtype) == ("cpu", "float32")
    assert resolved.rollout.order == "rounds"
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="sees no CUDA device here; use --device cpu"):
        build.resolve_machine_settings(replace(quickstart(), device="cuda"))


def test_with_a_gpu(gpu, monkeypatch):
    resolved = build.resolve_machine_settings(quickstart())
    assert (resolved.device, resolved.learner.dtype) == ("cuda", "bfloat16")
    assert resolved.rollout.order == "continuous"
    rounds = replace(quickstart(), rollout=RolloutConfig(order="rounds"))
    assert build.resolve_machine_settings(rounds).rollout.order == "rounds", "a value in the config is kept"
    assert build.resolve_machine_settings(resolved) == resolved, "resolving again changes nothing"
    chosen = build.resolve_machine_settings(replace(quickstart(), device="cpu"))
    assert (chosen.device, chosen.learner.dtype) == ("cpu", "float32")
    exact = build.resolve_machine_settings(replace(quickstart(), learner=LearnerConfig(dtype="float32")))
    assert (exact.device, exact.learner.dtype) == ("cuda", "float32")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose_dtype("auto", choose_device("auto")) == "float32", "no bf16 before compute capability 8"


def test_packed_weights_are_for_a_cpu_only(gpu):
    packed = replace(quickstart(), engine=NativeEngine(weights="packed"))
    assert build.resolve_machine_settings(packed).engine.weights == "shared"
    assert build.resolve_machine_settings(replace(packed, device="cpu")).engine.weights == "packed"
    with pytest.raises(ConfigError, match=r"engine\.weights = packed works on a CPU only"):
        build.resolve_machine_settings(replace(packed, device="cuda"))
