"""Whole training runs on a GPU: training, resumption, evaluation, and accuracy that rises."""

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


def make_config(steps: int, dtype: str = "auto", **learner):
    """Returns a short quickstart. `learner` are further settings of the learner."""
    return replace(
        quickstart(),
        steps=steps,
        batch=BatchConfig(prompts=16, samples=8),
        eval=EvalConfig(problems=100),
        learner=LearnerConfig(dtype=dtype, **learner),
    )


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 1e-3), ("auto", 0.05)])
def test_a_run_and_its_resumption(tmp_path, capsys, dtype, gap):
    path = build.train(make_config(2, dtype), tmp_path, "plain")
    build.resume(path, 4, "plain")
    with Reader(path / "run.db") as reader:
        gaps = reader.read_series("sampler_gap/mean")
    assert sorted(gaps) == [1, 2, 3, 4] and max(gaps.values()) < gap
    output = capsys.readouterr().out
    assert "memory plan:" in output and "the first update took" in output
    assert "prompts once per group" in output
    stored_config = (path / "config.yaml").read_text()
    assert "device: cuda" in stored_config and ("float32" if dtype == "float32" else "bfloat16") in stored_config


def test_accuracy_rises(tmp_path):
    path = build.train(replace(make_config(25), batch=BatchConfig(prompts=32, samples=8)), tmp_path, "plain")
    evaluations = RunDirectory.open(path).load_evaluations()
    assert evaluations[25].accuracy > evaluations[0].accuracy + 0.2
