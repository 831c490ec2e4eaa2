"""A whole run on a GPU, with everything a run on a CPU has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gpu.device import only_gpu

pytest.importorskip("tyro")

# isort: split

from cohort.config.schema import BatchConfig, EvalConfig, LearnerConfig
from cohort.jobs import build
from cohort.recipes.tiny import quickstart
from cohort.run.directory import RunDirectory
from cohort.run.store.reader import Reader

pytestmark = only_gpu


def config(steps: int, dtype: str = "auto", **learner):
    return replace(
        quickstart(),
        steps=steps,
        batch=BatchConfig(prompts=16, samples=8),
        eval=EvalConfig(problems=100),
        learner=LearnerConfig(dtype=dtype, **learner),
    )


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 1e-3), ("auto", 0.05)])
def test_a_run_and_its_resumption(tmp_path, capsys, dtype, gap):
    path = build.train(config(2, dtype), tmp_path, "plain")
    build.resume(path, 4, "plain")
    with Reader(path / "run.db") as reader:
        gaps = reader.read_series("sampler_gap/mean")
    assert sorted(gaps) == [1, 2, 3, 4] and max(gaps.values()) < gap
    shown = capsys.readouterr().out
    assert "memory plan:" in shown and "the first update took" in shown
    assert "prompts once per group" in shown
    written = (path / "config.yaml").read_text()
    assert "device: cuda" in written and ("float32" if dtype == "float32" else "bfloat16") in written


def test_reward_rises(tmp_path):
    path = build.train(replace(config(25), batch=BatchConfig(prompts=32, samples=8)), tmp_path, "plain")
    found = RunDirectory.open(path).load_evaluations()
    assert found[25].accuracy > found[0].accuracy + 0.2
