"""An engine that dies ends the run with one line, and the run goes on from its checkpoint as if nothing had been."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cohort.config.schema import SaveConfig
from cohort.engines.native.engine import NativeEngine
from cohort.errors import EngineError
from cohort.jobs import build
from cohort.run.store.reader import Reader
from tests.helpers.small_runs import preserved, small_run


def metrics(path: Path) -> list[tuple[int, str, float]]:
    with Reader(path / "run.db") as reader:
        rows = [(row.step, row.name, row.value) for row in reader.metrics()]
    return [row for row in rows if not row[1].startswith("time/") and row[1] != "rollouts/bytes"]


def test_a_run_whose_engine_died_is_resumed_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = replace(small_run(steps=4), save=SaveConfig(every=2))
    poll, left = NativeEngine.poll, [10**9]

    def mortal(engine: NativeEngine, timeout: float = 0.0):
        left[0] -= engine.version == 2  # in the third step
        if left[0] < 0:
            raise EngineError("the engine has died.")
        return poll(engine, timeout)

    with preserved():
        whole = build.train(config, tmp_path / "whole", "plain")
        monkeypatch.setattr(NativeEngine, "poll", mortal)
        left[0] = 2
        with pytest.raises(EngineError, match="the engine has died"):
            build.train(config, tmp_path / "broken", "plain")
        [broken] = (tmp_path / "broken").iterdir()
        left[0] = 10**9
        build.resume(broken, None, "plain")
    assert metrics(broken) == metrics(whole)
    last = Path("checkpoints") / "step-000004" / "model" / "model.safetensors"
    assert (broken / last).read_bytes() == (whole / last).read_bytes()
    with Reader(broken / "run.db") as reader:
        assert any("stopped by EngineError; go on with" in event.text for event in reader.events())
