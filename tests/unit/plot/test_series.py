"""Series of recorded runs, and the points of a curve."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cohort.errors import RunError
from cohort.plot.series import CurveOptions, Point, RunSeries, choose_window, list_metrics, read_series, select_series
from tests.helpers.recorded_runs import recorded_run


def test_a_run_is_read_with_everything_odd_in_it(tmp_path: Path):
    steps = {1: {"loss": 0.5, "odd": math.nan}, 2: {"loss": math.inf, "odd": 1.0}, 3: {"loss": -math.inf}}
    run = recorded_run(tmp_path / "a", steps, {0: (0.5, 0.4, 0.6)})
    before = sorted(path.name for path in run.iterdir())
    series = read_series(run, "first")
    assert series.label == "first"
    assert series.values["loss"] == {1: 0.5, 2: math.inf, 3: -math.inf}
    assert math.isnan(series.values["odd"][1]) and series.values["odd"][2] == 1.0
    assert list_metrics([series]) == ["loss", "odd", "eval/accuracy"]
    assert sorted(path.name for path in run.iterdir()) == before, "reading leaves no files behind"


def test_a_run_without_a_database_names_it(tmp_path: Path):
    run = recorded_run(tmp_path / "a", {})
    assert read_series(run).values == {}
    (run / "run.db").write_bytes(b"SQLite format 3\0" + b"x" * 4000)
    with pytest.raises(RunError, match=r"run\.db cannot be read"):
        read_series(run)
    (run / "run.db").unlink()
    with pytest.raises(RunError, match=r"there is no file .*run\.db"):
        read_series(run)


def test_damage_behind_the_first_pages_is_found_too(tmp_path: Path):
    run = recorded_run(tmp_path / "a", {step: {"loss": 1.0, "lr": 2.0} for step in range(1, 301)})
    data = bytearray((run / "run.db").read_bytes())
    # The first pages have the schema; the rows of the metrics lie behind it.
    half = len(data) // 2
    data[half:] = b"\xff" * (len(data) - half)
    (run / "run.db").write_bytes(data)
    with pytest.raises(RunError, match=r"run\.db cannot be read.*cohort resume"):
        read_series(run)


def test_evaluations_have_their_intervals_and_are_not_smoothed():
    values = {"eval/accuracy": {0: 0.5, 10: 0.75}, "eval/accuracy_low": {0: 0.4}, "eval/accuracy_high": {0: 0.6}}
    series = select_series(RunSeries(label="a", values=values), "eval/accuracy", CurveOptions(smooth=5))
    assert series.points[0] == Point(x=0.0, y=0.5, low=0.4, high=0.6)
    assert series.points[1].y == 0.75 and math.isnan(series.points[1].low)
    assert series.smooth == ()


def test_a_changed_grader_makes_a_gap(tmp_path: Path):
    accuracies = dict.fromkeys((0, 2, 4, 6), (0.5, 0.4, 0.6))
    run = recorded_run(tmp_path / "a", {1: {"loss": 1.0}}, accuracies)
    for step, grader in ((0, "old"), (2, "old"), (4, "new"), (6, "new")):
        setting = {"step": step, "grader": grader}
        (run / "eval" / f"step-{step:06d}.json").write_text(json.dumps({"setting": setting}), encoding="utf-8")
    (run / "eval" / "step-000008.json").write_text("{broken", encoding="utf-8")
    (run / "eval" / "step-000009.json").write_text("[1]", encoding="utf-8")
    series = read_series(run)
    assert series.grader_changes == (4,)
    points = select_series(series, "eval/accuracy", CurveOptions()).points
    assert [p.after_gap for p in points] == [False, False, True, False]
    assert not any(p.after_gap for p in select_series(series, "loss", CurveOptions()).points)


def test_steps_can_be_chosen_and_curves_smoothed():
    run = RunSeries(label="a", values={"loss": {step: float(step) for step in range(1, 11)}})
    series = select_series(run, "loss", CurveOptions(first=3, last=5, smooth=3))
    assert [p.x for p in series.points] == [3.0, 4.0, 5.0]
    # Steps that are not shown do not count in the means either.
    assert [p.y for p in series.smooth] == [3.5, 4.0, 4.5]
    assert select_series(run, "nothing", CurveOptions()).points == ()


def test_long_runs_are_smoothed():
    def window(num: int, **options: int) -> int:
        run = RunSeries(label="a", values={"loss": dict.fromkeys(range(1, num + 1), 1.0)})
        return choose_window([run], CurveOptions(**options))

    assert (window(100), window(101), window(1000)) == (1, 2, 25)
    assert window(1000, first=951) == 1 and window(1000, last=200) == 5
    assert window(1000, smooth=1) == 1 and window(10, smooth=7) == 7


def test_other_axes_are_sums_up_to_a_step():
    values = {"samples": {1: 8.0, 2: 8.0, 4: 4.0}, "eval/accuracy": {0: 0.1, 2: 0.2, 3: 0.3, 9: 0.4}}
    run = RunSeries(label="a", values=values)
    assert [p.x for p in select_series(run, "eval/accuracy", CurveOptions(x="samples")).points] == [0, 16, 16, 20]
    # What is left out by --steps counts still: the sum is that of the whole run.
    assert [p.x for p in select_series(run, "samples", CurveOptions(x="samples", first=2)).points] == [16, 20]
    with pytest.raises(RunError, match=r"a has not recorded time/step; use --x step"):
        select_series(run, "samples", CurveOptions(x="time"))
