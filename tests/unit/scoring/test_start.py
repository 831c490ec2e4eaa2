"""What is refused before scoring workers are started."""

from __future__ import annotations

from typing import Any

import pytest

from cohort.config.scoring import ScoringConfig
from cohort.errors import ConfigError
from cohort.scoring.process import make_worker_environment
from cohort.scoring.start import start_scorer
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.code.task import Code
from cohort.tasks.mix import Mix


@pytest.mark.parametrize("task", [Code(), Mix(tasks=("arithmetic", "code"))], ids=["code", "mixture"])
def test_keys_are_never_dropped_silently(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-planted-1")
    with pytest.raises(ConfigError, match=r"--scoring.env JUDGE_KEY .* the task code, .* Leave it out") as caught:
        start_scorer(task, ScoringConfig(env=("JUDGE_KEY",)))
    assert "\n" not in str(caught.value) and "planted" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(make_worker_environment()))
def test_variables_that_workers_have_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "elsewhere")
    with pytest.raises(ConfigError, match=f"--scoring.env {name} cannot be given"):
        start_scorer(Arithmetic(), ScoringConfig(env=(name,)))
