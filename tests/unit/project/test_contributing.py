"""The example in CONTRIBUTING.md is an algorithm that works, and costs what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cohort.algos import surrogates
from cohort.algos.algorithm import build_algorithm
from cohort.algos.segments import segment_mean
from cohort.algos.surrogates import Surrogate, Tokens, surrogate
from cohort.config import algos
from cohort.config.algos import Policy
from tests.unit.algos.test_families import evaluate_loss, inputs

TEXT = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_example_is_short_and_trains(monkeypatch):
    [code] = re.findall(r"```python\n(# config/algos.py.*?)```", TEXT, re.DOTALL)
    assert len(code.splitlines()) <= 40
    monkeypatch.setattr(surrogates, "_surrogates", dict(surrogates._surrogates))
    names = {"dataclass": dataclass, "Policy": Policy, "Tokens": Tokens, "Surrogate": Surrogate, "surrogate": surrogate}
    module = {**names, "segment_mean": segment_mean, "__name__": __name__}
    exec(compile(code, "CONTRIBUTING.md", "exec"), module)
    monkeypatch.setitem(algos.ALGOS, "fading", module["Fading"])
    value, slope, _ = evaluate_loss(module["Fading"](), inputs([1.0, 2.0], [1.0, 1.0]))
    trust = float(torch.exp(-((torch.tensor(2.0, dtype=torch.float64).log() / 0.5) ** 2)))
    assert value == pytest.approx(-1.0 - 2.0 * trust) and slope == pytest.approx([-1.0, -2.0 * trust])
    assert build_algorithm(module["Fading"](), 8).per_token
