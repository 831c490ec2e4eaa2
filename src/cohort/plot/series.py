"""Series of runs: the values of each metric by step, read from run.db, and the points that a chart draws of them.

Nothing is locked or written, so a run that is being trained can be read. No code of the run's config is run.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from cohort.errors import RunError
from cohort.plot.smooth import smooth_series
from cohort.run.store.reader import Reader
from cohort.system.json_text import read_json_file

EVALUATIONS = "eval/"  # how names of metrics of evaluations begin
# A metric with these endings beside another one has the ends of its 95% interval.
_LOW, _HIGH = "_low", "_high"
# What the x axis may show: the metrics that are summed over the steps, of which the first with values counts.
AXES: dict[str, tuple[str, ...]] = {
    "step": (),
    "samples": ("samples", "examples"),
    "tokens": ("tokens/sampled", "tokens"),
    "time": ("time/step",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSeries:
    """All series of one run."""

    label: str
    values: Mapping[str, Mapping[int, float]]  # metric -> step -> value; a value may be NaN or infinite
    # Metric -> step -> (lowest, highest) of the runs of which this is the mean; {} = it is one run.
    ranges: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    # Steps of the evaluations before which the grader has changed: accuracies on both sides cannot be compared.
    grader_changes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A value of a series, and the ends of its interval (NaN = it has none)."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan
    after_gap: bool = False  # whether no line joins it with the point before


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One metric of one run, as it is drawn: its points by rising x, and the smooth curve (empty = not smoothed)."""

    label: str
    points: tuple[Point, ...]
    smooth: tuple[Point, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveOptions:
    """Which part of a run is shown, and how."""

    x: str = "step"  # a key of AXES
    first: int = 0  # steps from here on
    last: int | None = None  # up to here; None = all
    # Steps of which each point of the smooth curve is the mean; 1 = not smoothed, 0 = chosen by `choose_window`.
    smooth: int = 0


def read_series(run: Path, label: str = "") -> RunSeries:
    """Returns all series of the run in the directory `run`; `label` is its name in the picture.

    Raises RunError if there is no run.db or it cannot be read.
    """
    if not run.is_dir():
        raise RunError(f"there is no run {run}. Give the directory that `cohort train` printed.")
    with Reader(run / "run.db", once=True) as reader:
        values = reader.read_all_series()
    return RunSeries(label=label or run.name, values=values, grader_changes=_find_grader_changes(run))


def _find_grader_changes(run: Path) -> tuple[int, ...]:
    """Returns the steps of the evaluations of a run whose grader is not that of the evaluation before.

    Files that cannot be read are left out: their numbers are in run.db.
    """
    graders: dict[int, str] = {}
    for file in (run / "eval").glob("step-*.json"):
        # The answers of all problems are in the file too: they are not made into records, which takes the most time.
        with suppress(OSError, ValueError, KeyError, TypeError):
            setting = read_json_file(file)["setting"]
            graders[int(setting["step"])] = str(setting["grader"])
    return tuple(step for before, step in pairwise(sorted(graders)) if graders[before] != graders[step])


def select_series(run: RunSeries, metric: str, options: CurveOptions, log: bool = False) -> Series:
    """Returns the series of `metric` as a chart draws it, without points if the run has no value of it.

    `log` says that the y axis is logarithmic, which changes how values are averaged.
    """
    values = run.values.get(metric, {})
    low = run.values.get(metric + _LOW, {})
    high = run.values.get(metric + _HIGH, {})
    ranges = run.ranges.get(metric, {})
    last = math.inf if options.last is None else options.last
    steps = [step for step in sorted(values) if options.first <= step <= last]
    places = _place_steps(run, steps, options.x)
    points = []
    for step in steps:
        ends = ranges.get(step, (low.get(step, math.nan), high.get(step, math.nan)))
        is_changed = metric.startswith(EVALUATIONS) and step in run.grader_changes
        points.append(Point(x=places[step], y=values[step], low=ends[0], high=ends[1], after_gap=is_changed))
    # Evaluations are few, and their intervals belong to their own values.
    if options.smooth <= 1 or metric.startswith(EVALUATIONS):
        return Series(label=run.label, points=tuple(points))
    means = smooth_series({step: values[step] for step in steps}, options.smooth, log)
    smooth = tuple(Point(x=places[step], y=mean) for step, mean in means.items())
    return Series(label=run.label, points=tuple(points), smooth=smooth)


def choose_window(runs: Sequence[RunSeries], options: CurveOptions) -> int:
    """Returns over how many steps curves are smoothed: as the options say or, if they do not, by the steps to show.

    Up to 100 steps there is room for every one of them; of more, each point is the mean of a fortieth of them.
    """
    if options.smooth:
        return options.smooth
    steps = {step for run in runs for values in run.values.values() for step in values}
    num = sum(options.first <= step <= (math.inf if options.last is None else options.last) for step in steps)
    return num // 40 if num > 100 else 1


def _place_steps(run: RunSeries, steps: Sequence[int], x: str) -> dict[int, float]:
    """Returns the place of each step on the x axis: the step itself, or the sum of a metric up to it.

    Raises RunError if the run has not recorded the metric.
    """
    if x == "step":
        return {step: float(step) for step in steps}
    counted = next((run.values[name] for name in AXES[x] if run.values.get(name)), None)
    if counted is None:
        if not any(steps):  # only step 0, before training
            return dict.fromkeys(steps, 0.0)
        raise RunError(f"{run.label} has not recorded {' or '.join(AXES[x])}; use --x step.")
    known = sorted(counted)
    sums = [0.0, *accumulate(counted[step] if math.isfinite(counted[step]) else 0.0 for step in known)]
    # A step without the metric, such as an evaluation before training, has the sum of the steps before it.
    return {step: sums[bisect_right(known, step)] for step in steps}


def list_metrics(runs: Sequence[RunSeries]) -> list[str]:
    """Returns the names of all metrics that a run has, in the order in which the runs recorded them.

    Those that are only the ends of an interval are left out.
    """
    names = dict.fromkeys(name for run in runs for name in run.values)
    ends = {name + end for name in names for end in (_LOW, _HIGH)}
    return [name for name in names if name not in ends]
