"""What tells the runs of a table apart: their settings in few words, and the short names of runs of a sweep."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from cohort.inspect.runs.query import format_plain
from cohort.run.summary import RunSummary

# Settings that say how long a run is and how it is measured, not how it learns. They are cut first.
_MINOR = re.compile(r"steps$|threads$|device$|eval\.|save\.")
_NUMBERED = re.compile(r"(.*/)?([0-9]{3,})-[^/]+", re.DOTALL)  # the name of a run of a sweep


def find_shared_settings(runs: Sequence[RunSummary]) -> set[str]:
    """Returns the names of settings that differ from the recipe in all runs, and are the same in all of them.

    Runs whose differences are not known do not count, so that a damaged run hides nothing.
    """
    values = [
        {name: format_plain(value) for name, value in run.differences.values.items()}
        for run in runs
        if run.differences.source
    ]
    if not values:
        return set()
    return {name for name, value in values[0].items() if all(other.get(name) == value for other in values)}


def shorten_names(runs: Sequence[RunSummary]) -> dict[str, str]:
    """Returns the last word of the name of each setting, where no other setting of the runs has that last word."""
    names = {name for run in runs for name in (*run.settings, *run.differences.values)}
    counts = Counter(name.rpartition(".")[2] for name in names)
    return {name: last for name in names if counts[last := name.rpartition(".")[2]] == 1}


def shorten_name(run: RunSummary) -> str:
    """Returns the name of a run. For a run of a sweep that is its number: its differences have the swept settings."""
    match = _NUMBERED.fullmatch(run.name) if run.sweep else None
    return f"{match[1] or ''}{match[2]}" if match else run.name


def format_differences(
    run: RunSummary,
    shared: Collection[str] = (),
    hidden: Collection[str] = (),
    words: Mapping[str, str] | None = None,
) -> str:
    """Returns the settings of a run that differ from its recipe, as in "optim.lr=1e-4 seed=3".

    What tells the runs apart must not be cut. So those of `shared`, which all runs of the table have, come last, and
    before them those that say nothing about how the run learns. Those of `hidden` are left out. `words` are short names
    of settings.

    >>> from pathlib import Path
    >>> from cohort.config.differences import SettingsDifference
    >>> differences = SettingsDifference(values={"steps": 9, "seed": 3, "optim.lr": 1e-4}, source="recipe")
    >>> run = RunSummary(name="a", path=Path("a"), state="done", differences=differences)
    >>> format_differences(run, {"seed"}), format_differences(run, (), {"steps"}, {"optim.lr": "lr"})
    ('optim.lr=1e-4 steps=9 seed=3', 'seed=3 lr=1e-4')
    """
    swept = run.sweep.axes if run.sweep else ()
    values = [item for item in run.differences.values.items() if item[0] not in hidden]
    values.sort(key=lambda item: (item[0] in shared, item[0] not in swept and _MINOR.match(item[0]) is not None))
    return " ".join(f"{(words or {}).get(name, name)}={format_plain(value)}" for name, value in values)
