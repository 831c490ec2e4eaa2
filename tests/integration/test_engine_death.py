"""An engine that dies stops the run with one line. Resumed from its checkpoint, the run gives the same results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cohort.config.schema import SaveConfig
from cohort.engines.native.engine import NativeEngine
from cohort.errors import EngineError
from cohort.jobs import build
from cohort.run.store.reader import Reader
from tests.helpers.small_runs import keep_torch_settings, small_run


def metrics(path: Path) -> list[tuple[int, str, float]]:
    """Returns all metrics of a run except those that depend on the clock."""
    with Reader(path / "run.db") as reader:
        rows = [(row.step, row.name, row.value) for row in reader.read_metrics()]
    return [row for row in rows if not row[1].startswith("time/") and row[1] != "rollouts/bytes"]


def test_a_run_whose_engine_died_is_resumed_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = replace(small_run(steps=4), save=SaveConfig(every=2))
    poll, polls_left = NativeEngine.poll, [10**9]

    def poll_until_death(engine: NativeEngine, timeout: float = 0.0):
        polls_left[0] -= engine.version == 2  # the version of the third step
        if polls_left[0] < 0:
            raise EngineError("the engine has died.")
        return poll(engine, timeout)

    with keep_torch_settings():
        whole = build.train(config, tmp_path / "whole", "plain")
        monkeypatch.setattr(NativeEngine, "poll", poll_until_death)
        polls_left[0] = 2
        with pytest.raises(EngineError, match="the engine has died"):
            build.train(config, tmp_path / "broken", "plain")
        [broken] = (tmp_path / "broken").iterdir()
        polls_left[0] = 10**9
        build.resume(broken, None, "plain")
    assert metrics(broken) == metrics(whole)
    last = Path("checkpoints") / "step-000004" / "model" / "model.safetensors"
    assert (broken / last).read_bytes() == (whole / last).read_bytes()
    with Reader(broken / "run.db") as reader:
        assert any("stopped by EngineError; go on with" in event.text for event in reader.read_events())
