"""Means of runs that differ only in their seed: one curve, with the range from the lowest run to the highest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import fsum

from cohort.config.document import diff_configs
from cohort.config.schema import RunConfig
from cohort.plot.labels import NOT_TOLD
from cohort.plot.series import RunSeries, list_metrics


def group_by_settings(configs: Sequence[RunConfig | None]) -> list[list[int]]:
    """Returns the indices of runs in groups that have the same settings except the seed, in the order of the runs.

    Settings that do not change what is learned may differ as well. A run whose config is not known is alone.
    """
    groups: list[list[int]] = []
    for index, config in enumerate(configs):
        group = next((group for group in groups if _is_same(configs[group[0]], config)), None)
        if group is None:
            groups.append([index])
        else:
            group.append(index)
    return groups


def _is_same(a: RunConfig | None, b: RunConfig | None) -> bool:
    """Returns whether two configs are known and differ at most in their seed and in what is not told in labels."""
    return a is not None and b is not None and not diff_configs(a, b).keys() - {"seed", *NOT_TOLD}


def average_runs(runs: Sequence[RunSeries], label: str) -> RunSeries:
    """Returns the means of runs by metric and step, with their ranges; a single run is returned with the new label.

    Only steps that all of them have count, or the curve would jump where a shorter run ends. The intervals of their
    evaluations are left out: the range takes their place.
    """
    if len(runs) == 1:
        return replace(runs[0], label=label)
    values: dict[str, dict[int, float]] = {}
    ranges: dict[str, dict[int, tuple[float, float]]] = {}
    for name in list_metrics(runs):
        series = [run.values.get(name, {}) for run in runs]
        steps = sorted(set.intersection(*(set(one) for one in series)))
        rows = {step: [one[step] for one in series] for step in steps}
        if rows:
            values[name] = {step: _compute_mean(row) for step, row in rows.items()}
            ranges[name] = {step: (min(row), max(row)) for step, row in rows.items()}
    changes = {step for run in runs for step in run.grader_changes}
    return RunSeries(label=label, values=values, ranges=ranges, grader_changes=tuple(sorted(changes)))


def _compute_mean(row: Sequence[float]) -> float:
    """Returns the mean of numbers. It is NaN or infinite if one of them is."""
    # Infinities of both signs make fsum raise; their sum is NaN.
    return sum(row) / len(row) if float("inf") in map(abs, row) else fsum(row) / len(row)
