"""Means of runs that differ only in their seed, by hand."""

from __future__ import annotations

import math

from cohort.config.schema import OptimConfig
from cohort.plot.labels import label_means
from cohort.plot.means import average_runs, group_by_settings
from cohort.plot.picture import PictureOptions, draw_runs
from cohort.plot.series import CurveOptions, Point, RunSeries, select_series
from tests.helpers.pretend_run import small_run

A = RunSeries(label="a", values={"loss": {1: 1.0, 2: 4.0, 3: 9.0}, "eval/accuracy": {0: 0.5}, "only": {1: 1.0}})
B = RunSeries(label="b", values={"loss": {1: 3.0, 2: 2.0}, "eval/accuracy": {0: 0.7}, "eval/accuracy_low": {0: 0.1}})


def test_runs_are_grouped_by_their_settings():
    fast = OptimConfig(lr=0.5)
    configs = [small_run(seed=1), small_run(seed=1, optim=fast), small_run(seed=2, steps=9), None, None]
    groups = group_by_settings(configs)
    assert groups == [[0, 2], [1], [3], [4]]
    labels = label_means(["a", "b", "c", "d", "e"], groups, configs)
    assert labels == ["a (2 seeds)", "b", "d", "e"], "a config is not known, so settings cannot be told"
    assert label_means(["a", "b", "c"], groups[:2], configs[:3]) == [
        f"optim.lr {OptimConfig().lr:g} (2 seeds)",
        "optim.lr 0.5",
    ]
    assert label_means(["a", "b"], [[0, 1]], [small_run(), small_run(seed=1)]) == ["mean of 2 seeds"]


def test_means_and_ranges_of_the_steps_that_all_have():
    mean = average_runs([A, B], "both")
    assert mean.label == "both"
    assert mean.values == {"loss": {1: 2.0, 2: 3.0}, "eval/accuracy": {0: 0.6}}
    series = select_series(mean, "loss", CurveOptions())
    assert series.points == (Point(x=1.0, y=2.0, low=1.0, high=3.0), Point(x=2.0, y=3.0, low=2.0, high=4.0))
    assert average_runs([A], "alone") == RunSeries(label="alone", values=A.values)


def test_what_is_not_finite_stays_so():
    values = [{1: math.nan, 2: math.inf, 3: math.inf}, {1: 1.0, 2: 1.0, 3: -math.inf}]
    loss = average_runs([RunSeries(label="", values={"loss": one}) for one in values], "").values["loss"]
    assert math.isnan(loss[1]) and loss[2] == math.inf and math.isnan(loss[3])


def test_the_picture_says_that_bands_are_ranges():
    text = draw_runs([average_runs([A, B], "both")], PictureOptions(metrics=("loss", "accuracy")))
    assert "curves: the mean over seeds; bands and bars: from the lowest seed to the highest" in text
    assert "95%" not in text and 'fill-opacity="0.15"' in text
