"""Notes about curves that end before their run does: which ones, where, and why."""

from __future__ import annotations

from collections.abc import Sequence

from cohort.logs.escape import escape_line
from cohort.plot.scale import is_drawable
from cohort.plot.series import EVALUATIONS, CurveOptions, RunSeries

_LEAST_SHARE = 0.03  # of the steps that are shown; a curve that ends closer to the last one looks complete
_MOST_NOTES = 4


def explain_endings(runs: Sequence[RunSeries], metrics: Sequence[str], options: CurveOptions) -> list[str]:
    """Returns a sentence per run, and step, at which curves of `metrics` end before the run; [] if none do."""
    notes = []
    for run in runs:
        end, endings = _find_endings(run, metrics, options)
        for last, names in endings.items():
            who = f"{escape_line(run.label, 100)}: " if len(runs) > 1 else ""
            what = escape_line(", ".join(names), 200)
            verb = "ends" if len(names) == 1 else "end"
            notes.append(f"{who}{what} {verb} at step {last}. {_find_reason(run, names, last, end)}")
    more = len(notes) - _MOST_NOTES
    return notes if more <= 0 else [*notes[:_MOST_NOTES], f"{more} more such curves are not listed."]


def _find_endings(run: RunSeries, metrics: Sequence[str], options: CurveOptions) -> tuple[int, dict[int, list[str]]]:
    """Returns the last step of a run that is shown, and by an earlier step the metrics whose curves end there.

    Evaluations do not count: they are rare.
    """
    last = float("inf") if options.last is None else options.last
    series = {name: values for name, values in run.values.items() if not name.startswith(EVALUATIONS)}
    steps = [step for values in series.values() for step in values if options.first <= step <= last]
    if not steps:
        return 0, {}
    end, least = max(steps), _LEAST_SHARE * (max(steps) - min(steps))
    endings: dict[int, list[str]] = {}
    for name in metrics:
        good = [s for s, v in series.get(name, {}).items() if options.first <= s <= end and is_drawable(v)]
        if good and end - max(good) > least:
            endings.setdefault(max(good), []).append(name)
    return end, endings


def _find_reason(run: RunSeries, names: Sequence[str], last: int, end: int) -> str:
    """Returns why the curves of `names` end at step `last`, although the run has steps up to `end`."""
    later = range(last + 1, end + 1)

    def is_counted(metric: str) -> bool:
        return any(run.values.get(metric, {}).get(step, 0) > 0 for step in later)

    if is_counted("updates/bad"):
        return "After it gradients were not finite (NaN or infinite), and the updates were skipped."
    if is_counted("updates/no_signal"):
        return "After it there was no signal to learn from (equal rewards in every group), so no update was made."
    if any(step in run.values[name] for name in names for step in later):
        return "Later values are not finite or too large to draw."
    return "Later steps have no value."
