"""The folder of a sweep: one process at a time makes it, and results whose runs are lost do not count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cohort.config.load import load_config
from cohort.config.schema import RunConfig
from cohort.errors import RunError
from cohort.run.directory import RunDirectory
from cohort.run.store.db import Store
from cohort.sweep.collect import collect_table, load_record
from cohort.sweep.directory import RunResult, SweepDirectory, require_free
from cohort.sweep.plan import FixedSetting, Plan
from cohort.sweep.worker import require_planned
from tests.helpers.evaluations import evaluation

PLAN = Plan(
    recipe="quickstart",
    folder="/folder",
    settings=[FixedSetting(name="steps", words=["5"])],
    axes=["optim.lr"],
    combinations=[[["1e-4"]], [["1e-3"]]],
    seeds=[0],
)


@pytest.fixture
def finished(tmp_path: Path) -> SweepDirectory:
    """A sweep whose two runs are done and evaluated after step 5."""
    directory = SweepDirectory.create(tmp_path / "s", PLAN)
    for run in PLAN.list_runs():
        made = RunDirectory.create(directory.path, PLAN.load_config(run.values, run.seed), run.name)
        made.save_evaluation(evaluation({"0": [1.0], "1": [0.0]}, step=5, split="validation"))
        store = Store(made.database)
        store.write_evaluation(5, {"eval/accuracy": 0.5})
        store.close()
        made.unlock()
        directory.save_result(run, RunResult(state="done", step=5))
    return directory


def test_the_second_process_is_told_who_makes_the_sweep(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = SweepDirectory.create(path, PLAN)
    for attempt in (lambda: SweepDirectory.create(path, PLAN), lambda: require_free(path)):
        with pytest.raises(RunError, match=r"the sweep .*/s is being written by process \d+"):
            attempt()
    # Also before the plan is there, and there are folders or nothing at all.
    (path / "sweep.yaml").unlink()
    with pytest.raises(RunError, match="is being written by process"):
        require_free(path)
    for folder in (first.logs, first.results):
        folder.rmdir()
    require_free(path)
    with pytest.raises(RunError, match="is being written by process"):
        SweepDirectory.create(path, PLAN)
    assert [file.name for file in path.iterdir()] == [".sweep-lock"]


def test_a_sweep_that_another_process_has_made_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = SweepDirectory.create(path, PLAN)
    first._lock.release()
    with pytest.raises(RunError, match=r"another process has made the sweep .* Repeat the command"):
        SweepDirectory.create(path, replace(PLAN, seeds=[1]))
    assert SweepDirectory.open(path).plan == PLAN


def test_a_result_of_an_unknown_state_does_not_count(finished: SweepDirectory) -> None:
    first = PLAN.list_runs()[0]
    file = finished.results / "001.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "state": "exploded"}))
    assert finished.load_result(first) is None and not load_record(finished, first).has_result
    assert [row.state for row in collect_table(finished, PLAN.list_runs()).runs] == ["missing", "done"]


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("config.yaml", None, "its folder, or the config.yaml in it, is gone"),
        ("eval/step-000005.json", None, "its evaluation after step 5 is gone"),
        ("eval/step-000005.json", "{", "its eval/step-000005.json is damaged. Delete that file, then resume the sweep"),
    ],
)
def test_a_run_that_is_lost_is_missing_and_the_others_are_shown(
    finished: SweepDirectory, file: str, text: str | None, why: str
) -> None:
    first, second = PLAN.list_runs()
    path = finished.get_run_path(first)
    # An evaluation of an earlier step does not stand in for it.
    (path / "eval/step-000003.json").write_bytes((path / "eval/step-000005.json").read_bytes())
    (path / file).unlink()
    if text is not None:
        (path / file).write_text(text)
    table = collect_table(finished, [first, second])
    assert [(row.state, row.accuracy, row.why) for row in table.runs] == [("missing", None, why), ("done", 0.5, "")]
    assert table.best is table.combinations[1] and not load_record(finished, first).has_result
    finished.remove_result(first)
    assert finished.load_result(first) is None and finished.load_result(second) is not None


def make_config(**changes: object) -> RunConfig:
    """Returns the config of the quickstart with changes."""
    return replace(load_config("quickstart"), **changes)  # type: ignore[arg-type]


def test_a_run_with_other_settings_than_the_plan_is_refused() -> None:
    planned = make_config(steps=2)
    # What the machine decides may differ.
    require_planned(replace(planned, device="cpu", learner=replace(planned.learner, dtype="float32")), planned, 2)
    with pytest.raises(RunError, match=r"its config.yaml has steps = 6, and the sweep 2\. Move its folder away"):
        require_planned(make_config(steps=6), planned, 2)
    other = make_config(steps=2, seed=7, optim=replace(planned.optim, lr=0.5))
    with pytest.raises(RunError, match=r"has .* = .*, and the sweep .* \(and 1 more that differ\)"):
        require_planned(other, planned, 1)
    # Extended by hand, and then the number of steps put back.
    with pytest.raises(RunError, match="it has been trained for 6 steps, and the sweep trains 2"):
        require_planned(planned, planned, 6)
