"""Prediction of times: which earlier runs count, and the arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cohort.config.flags import split_args
from cohort.config.load import load_config
from cohort.run.directory import RunDirectory
from cohort.run.store.db import Store
from cohort.sweep.plan import Plan, PlannedRun
from cohort.sweep.predict import (
    TimeStats,
    count_evaluations,
    describe_work,
    find_earlier_timing,
    is_same_work,
    predict_times,
)
from cohort.sweep.prepare import SweepRequest, prepare_plan


def test_evaluations_are_counted() -> None:
    def count(*flags: str) -> int:
        return count_evaluations(load_config("quickstart", flags))

    assert count("--steps", "10") == 2
    assert count("--steps", "10", "--eval.every", "5") == 3  # after 0, 5 and 10
    assert count("--steps", "10", "--eval.every", "3") == 5  # after 0, 3, 6, 9 and 10
    assert count_evaluations(load_config("tiny_sft")) == 0


def test_only_settings_that_change_the_work_of_a_step_count() -> None:
    ours = describe_work(load_config("quickstart", ["--threads", "1"]))
    same = ["--threads", "1", "--optim.lr", "1e-3", "--seed", "3", "--eval.problems", "9", "--device", "cpu"]
    assert is_same_work(ours, describe_work(load_config("quickstart", same)))
    for other in (["--threads", "2"], ["--threads", "1", "--batch.samples", "4"], ["--threads", "1", "--algo", "dapo"]):
        assert not is_same_work(ours, describe_work(load_config("quickstart", other)))


def test_the_median_step_and_the_evaluation_of_the_newest_run_are_taken(tmp_path: Path) -> None:
    config = load_config("quickstart", ["--threads", "1", "--eval.problems", "50"])
    assert find_earlier_timing(config, tmp_path) is None
    directory = RunDirectory.create(tmp_path, replace(config, device="cpu"), "a")
    directory.unlock()
    store = Store(directory.database)
    for step, seconds in ((1, 90.0), (2, 2.0), (3, 4.0), (4, 3.0)):
        store.write_step(step, {"time/step": seconds})
    store.write_evaluation(4, {"eval/accuracy": 0.5})
    store.close()
    found = find_earlier_timing(config, tmp_path)
    assert found is not None and found.step == 3.0 and found.source == f"the steps of {directory.path}"
    # The rows were written at once, so the evaluation took no time: 5 s of start and 30 steps are left.
    assert found.predict_seconds(config) == pytest.approx(95.0, abs=0.5)
    assert find_earlier_timing(load_config("quickstart", ["--threads", "2"]), tmp_path) is None
    (directory.config_file).write_text("damaged")
    assert find_earlier_timing(config, tmp_path) is None


def test_each_kind_of_work_is_measured_once_and_at_most_four_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(plan: Plan, run: PlannedRun) -> TimeStats:
        measured.append(run.label)
        return TimeStats(step=float(len(measured)), evaluation=0.0, start=0.0, source="now")

    monkeypatch.setattr("cohort.sweep.predict.measure_timing", measure)
    line = "--learner.minibatches 1,2,3,4,5 --optim.lr 1e-4,1e-3 --steps 10 --task.train-size 300 --threads 1"
    request = SweepRequest(recipe="quickstart", given=split_args(line.split())[1])
    checked = prepare_plan(request)
    found = predict_times(checked.plan, checked.configs, tmp_path, lambda text: None)
    assert measured == [f"learner.minibatches={n} optim.lr=1e-4" for n in (1, 2, 3, 4)]
    assert [seconds for seconds, _ in found[:8]] == [10.0, 10.0, 20.0, 20.0, 30.0, 30.0, 40.0, 40.0]
    assert found[8] == (25.0, "the mean of the others")
