"""What the folder of a sweep tells about its runs: which of their settings are swept, and which the sweep itself set.

Nothing here fails: a plan that cannot be read tells nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from cohort.config.differences import SettingsDifference
from cohort.config.regular_yaml import read_regular_yaml
from cohort.config.yaml_text import MAX_SIZE, read_yaml
from cohort.errors import CohortError

SWEEP_FILE = "sweep.yaml"  # a directory with it is a sweep


@dataclass(frozen=True, kw_only=True, slots=True)
class SweptSettings:
    """Names of settings of the runs of a sweep."""

    axes: tuple[str, ...] = ()  # which the user swept; the seed is among them if there are several
    own: tuple[str, ...] = ()  # which the sweep set without being told, such as threads


def read_swept_settings(folder: Path) -> SweptSettings | None:
    """Returns what the plan in a folder says; None if the folder is no sweep, nothing if the plan is damaged."""
    file = folder / SWEEP_FILE
    try:
        about = file.stat()
    except OSError:
        return None
    return _read_plan(file.absolute(), about.st_mtime_ns, about.st_size)


# All runs of a sweep ask for the same plan.
@lru_cache(maxsize=64)
def _read_plan(file: Path, time: int, size: int) -> SweptSettings:
    """Returns what a plan says. `time` and `size` are those of the file, so that a changed one is read again."""
    try:
        if not file.is_file() or size > 4 * MAX_SIZE:
            return SweptSettings()
        text = file.read_text(encoding="utf-8")
        tree = read_regular_yaml(text)
        tree = read_yaml(text, "it") if tree is None else tree
    except (CohortError, OSError, ValueError):
        return SweptSettings()
    if not isinstance(tree, dict):
        return SweptSettings()
    axes, seeds = tree.get("axes"), tree.get("seeds")
    names = [name for name in axes if isinstance(name, str)] if isinstance(axes, list) else []
    if isinstance(seeds, list) and len(seeds) > 1:
        names.append("seed")
    own = [name for key, name in (("threads", "threads"), ("split", "eval.split")) if tree.get(key)]
    return SweptSettings(axes=tuple(names), own=tuple(own))


def adjust_differences(
    differences: SettingsDifference, settings: Mapping[str, Any], swept: SweptSettings
) -> SettingsDifference:
    """Returns the differences of a run of a sweep: the swept settings first, also those that equal the recipe's.

    What the sweep set by itself is left out: the user did not make it.
    """
    values = {name: settings[name] for name in swept.axes if name in settings}
    rest = {name: value for name, value in differences.values.items() if name not in values and name not in swept.own}
    return replace(differences, values=values | rest)
