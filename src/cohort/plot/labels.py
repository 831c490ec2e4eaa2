"""Names of runs in a picture: what a run is, and what tells it from the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cohort.config.document import diff_configs, get_variant_name
from cohort.config.schema import RunConfig
from cohort.errors import CohortError
from cohort.run.directory import RunDirectory

_MADE = re.compile(r"\d{4}-\d{2}-\d{2}-.+-[a-z0-9]{4}")  # a name that `make_run_name` returns
_MOST_SETTINGS = 3  # differing settings that a label names
# Settings that change nothing of what is learned, or that the curves show themselves.
NOT_TOLD = ("steps", "recipe", "threads", "log", "out")


def read_config(run: Path) -> RunConfig | None:
    """Returns the config of a run; None if it cannot be read. No foreign code is run."""
    try:
        return RunDirectory.open(run).config
    except CohortError:
        return None


def describe_run(config: RunConfig) -> str:
    """Returns the title of the picture of one run: recipe, model, task or data, algorithm and seed.

    The name of its directory is not in it, so that equal runs have equal pictures.
    """
    parts = [f"model {_shorten(config.model)}"]
    for field, word in (("task", "task"), ("data", "data"), ("algo", "algorithm")):
        if field in config.variants and getattr(config, field) is not None:
            parts.append(f"{word} {_shorten(get_variant_name(field, getattr(config, field)))}")
    return f"{_shorten(config.recipe) or config.kind}: {', '.join([*parts, f'seed {config.seed}'])}"


def _shorten(name: str) -> str:
    """Returns the last part of a path, or a name that is none."""
    return name.rstrip("/").rpartition("/")[2]


def describe_runs(configs: Sequence[RunConfig | None]) -> str:
    """Returns the title of the picture of several runs: what they have in common."""
    known = [config for config in configs if config is not None]
    recipes = {_shorten(config.recipe) or config.kind for config in known}
    models = {_shorten(config.model) for config in known}
    if len(known) < len(configs) or len(recipes) != 1:
        return f"{len(configs)} runs"
    model = f", model {models.pop()}" if len(models) == 1 else ""
    return f"{recipes.pop()}{model}: {len(configs)} runs"


def label_runs(runs: Sequence[Path], configs: Sequence[RunConfig | None]) -> list[str]:
    """Returns a label per run that tells it from the others.

    A run that has a name of its user keeps it. Otherwise the label has the settings that differ, if they are few, such
    as "seed 2, optim.lr 0.001". If those do not tell the runs apart, it has the part of the name that differs. Runs of
    the same name have their paths.
    """
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        return [str(run) for run in runs]
    made = [_MADE.fullmatch(name) is not None for name in names]
    if len(runs) == 1 or not any(made):
        return names
    short = _cut_common_start(names) if all(made) else names
    settings = _list_differences(configs)
    if not settings or any(not 1 <= len(own) <= _MOST_SETTINGS for own in settings):
        return short
    told = [", ".join(f"{name} {_format_setting(value)}" for name, value in own.items()) for own in settings]
    labels = [f"{label} ({name})" if told.count(label) > 1 else label for label, name in zip(told, short, strict=True)]
    return [label if is_made else name for label, name, is_made in zip(labels, names, made, strict=True)]


def label_means(
    labels: Sequence[str], groups: Sequence[Sequence[int]], configs: Sequence[RunConfig | None]
) -> list[str]:
    """Returns a label per group of runs, of which `labels` has one per run: what the group has, and how many seeds.

    `groups` has the indices of the runs of each group.
    """
    firsts = [configs[group[0]] for group in groups]
    settings = _list_differences([config and replace(config, seed=0) for config in firsts])
    told = [", ".join(f"{name} {_format_setting(value)}" for name, value in own.items()) for own in settings]
    if len(set(told)) < len(groups) or any(len(own) > _MOST_SETTINGS for own in settings):
        told = [labels[group[0]] for group in groups]
    if len(groups) == 1:
        return [f"mean of {len(groups[0])} seeds"]
    return [
        f"{label} ({len(group)} seeds)" if len(group) > 1 else label for label, group in zip(told, groups, strict=True)
    ]


def _list_differences(configs: Sequence[RunConfig | None]) -> list[dict[str, Any]]:
    """Returns, per run, its values of the settings in which any two of the runs differ; [] if a config is not known."""
    known = [config for config in configs if config is not None]
    if len(known) < len(configs):
        return []
    differing: dict[str, Any] = {}
    for other in known[1:]:
        differing |= {name: first for name, (first, _) in diff_configs(known[0], other).items()}
    names = [name for name in differing if name not in NOT_TOLD]
    rows = []
    for config in known:
        changed = diff_configs(known[0], config)
        rows.append({name: changed[name][1] if name in changed else differing[name] for name in names})
    return rows


def _format_setting(value: Any) -> str:
    """Returns the value of a setting in few characters."""
    return f"{value:g}" if isinstance(value, float) else _shorten(str(value))


def _cut_common_start(names: Sequence[str]) -> list[str]:
    """Returns the names without the words that all of them begin with; whole names if one would be empty.

    >>> _cut_common_start(["2026-11-15-countdown-k3f9", "2026-11-15-countdown-p04x"])
    ['k3f9', 'p04x']
    """
    first, last = min(names), max(names)
    # What the first and the last in alphabetical order share, all share.
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    length = first[:same].rfind("-") + 1
    return list(names) if any(len(name) <= length for name in names) else [name[length:] for name in names]
