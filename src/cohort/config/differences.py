"""How the settings of a run differ from its recipe, or, where the recipe is foreign code, which ones its command set.

No foreign code is run: only recipes and classes of the package are loaded.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cohort.config.document import NO_VARIANT, collect_written_settings, get_variant_name
from cohort.config.flags import collect_settings, split_args
from cohort.config.kinds import VARIANTS
from cohort.config.load import load_config
from cohort.config.schema import RunConfig
from cohort.config.section import Section
from cohort.errors import CohortError
from cohort.recipes import RECIPES
from cohort.tasks.base import choose_task, make_with_defaults

# What every run has of its own, and flags of `cohort train` that are no settings.
_NOT_COMPARED = frozenset({"format", "kind", "recipe", "date"})
_COMMAND_FLAGS = frozenset({"name", "out", "log", "sinks", "ranks"})
# The value that stands for a choice which is made when the run starts, and then recorded.
_CHOSEN_AT_START = "auto"
_FLAG = re.compile(r"(?<!\S)'?--([\w.-]+)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SettingsDifference:
    """The settings of a run that are not those of its recipe."""

    values: Mapping[str, Any]  # by full name, such as optim.lr; None = a section that the recipe has, and is off here
    source: str  # "recipe" = from a comparison with it, "command" = what the command set, "" = not known


def flatten_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings in the nested dicts of a config file by full name. A variant's name stands under its field.

    >>> flatten_settings({"steps": 3, "algo": {"name": "grpo", "kl": {"weight": 0.1}}})
    {'steps': 3, 'algo': 'grpo', 'algo.kl.weight': 0.1}
    """
    settings: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            is_variant = key in VARIANTS and isinstance(value.get("name"), str)
            inner = {name: item for name, item in value.items() if not (is_variant and name == "name")}
            settings |= {key: value["name"]} if is_variant else {}
            settings |= {f"{key}.{name}": item for name, item in flatten_settings(inner).items()}
        else:
            settings[str(key)] = value
    return settings


def find_differences(settings: Mapping[str, Any], command: str) -> SettingsDifference:
    """Returns the settings of a run that its recipe does not have, in the order of `settings`.

    `settings` are those of its config.yaml by full name, and `command` is what the user typed to start it. A setting
    that the recipe leaves to the machine, such as `device`, one of foreign code, and steps that follow from passes over
    the data differ only if the command names them. If the recipe is not
    one of the package, the settings that the command names are returned.
    """
    recipe = settings.get("recipe")
    variants = tuple((field, str(settings[field])) for field in VARIANTS if field in settings)
    base = None
    if isinstance(recipe, str) and recipe in RECIPES:
        base = _load_base(recipe, variants, _list_choosing_settings(settings))
    if base is None:
        given = _read_command(command)
        named = {name: settings.get(name, text) for name, text in given.items()}
        return SettingsDifference(values=named, source="command" if command.startswith("cohort ") else "")
    found: dict[str, Any] = {}
    flags = {name.replace("-", "_") for name in _FLAG.findall(command)}
    unsaid = {name for name, value in base.values.items() if value == _CHOSEN_AT_START}
    if command.startswith("cohort "):
        # What the recipe does not have may be a default of the user's own class.
        unsaid |= {name for name in settings if name.startswith(base.foreign)}
        # Passes become steps when the rows are read.
        unsaid |= {"passes", "steps"} if base.values.get("passes") and not settings.get("passes") else set()
    for name, value in settings.items():
        if name in _NOT_COMPARED or (name in base.values and base.values[name] == value):
            continue
        if name not in unsaid or name in flags:
            found[name] = value
    if "passes" in unsaid & flags:
        passes = _read_number(_read_command(command).get("passes", ""))
        # With --passes 0 the user gave steps.
        found = {name: value for name, value in found.items() if name != "passes"}
        found |= {"passes": passes} if passes and passes != base.values["passes"] else {}
    for section in base.sections:
        if section not in settings and not any(name.startswith(f"{section}.") for name in settings):
            found[section] = None
    return SettingsDifference(values=found, source="recipe")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _BaseSettings:
    """What the settings of a run are compared with."""

    values: Mapping[str, Any]  # all settings of the recipe by full name, those of sections that are off among them
    sections: tuple[str, ...]  # optional sections and variants that the recipe has
    foreign: tuple[str, ...]  # beginnings of the names of settings that foreign code has


@lru_cache(maxsize=256)
def _load_base(
    recipe: str, variants: tuple[tuple[str, str], ...], choosing: tuple[tuple[str, Any], ...] = ()
) -> _BaseSettings | None:
    """Returns the settings of a built-in recipe. A variant that it does not have starts from its own defaults.

    `variants` are pairs of field and name, such as ("algo", "grpo"), and `choosing` are settings of the task that
    decide what other settings it has, with their values. None if the recipe cannot be loaded here. A variant that is
    foreign code has no settings.
    """
    unknown = []
    try:
        config = load_config(recipe)
        own = {field: get_variant_name(field, getattr(config, field)) for field in config.variants}
        for field, name in variants:
            if field in own and name != own[field] and VARIANTS[field].is_known(name):
                config = _choose_variant(config, field, name)
            elif field in own and name != own[field]:
                unknown.append(field)
        chosen = choose_task(getattr(config, "task", None), dict(choosing))
    # A task may need a package or a file that is not here.
    except (CohortError, ImportError):
        return None
    # The settings that the recipe's task has, and those that the run's choice adds, with their defaults.
    both = (collect_settings(chosen, "task.") if chosen is not None else {}) | collect_settings(config)
    values = {name: _make_plain(setting.value) for name, setting in both.items()}
    values = {name: value for name, value in values.items() if name.partition(".")[0] not in unknown}
    written = collect_written_settings(config)
    on = [name for name in _list_optional_sections(config) if any(key.startswith(f"{name}.") for key in written)]
    on += [field for field in config.optional_variants if own[field] != NO_VARIANT]
    # The parts of a reward are those of the task.
    foreign = tuple(f"{field}." for field in (*unknown, *(["reward"] if "task" in unknown else [])))
    return _BaseSettings(values=values | own, sections=tuple(on), foreign=foreign)


def _list_choosing_settings(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns the settings of a run's task that may decide what other settings it has; () for almost all tasks."""
    name = str(settings.get("task", ""))
    if not VARIANTS["task"].is_known(name) or not hasattr(VARIANTS["task"].find(name), "choose"):
        return ()
    own = ((key.removeprefix("task."), value) for key, value in settings.items() if key.startswith("task."))
    return tuple((key, value) for key, value in own if isinstance(value, str | int))


def _choose_variant(config: RunConfig, field: str, name: str) -> RunConfig:
    """Returns the config with the built-in variant `name` in the field, which has its defaults."""
    cls = VARIANTS[field].find(name)
    config = config.replace_variant(field, make_with_defaults(cls) if field == "task" else cls())
    # A part of the reward that the config does not name has the coefficient 1.
    filled: dict[str, Any] = {key: dataclasses.asdict(record) for key, record in config.make_flag_records().items()}
    return dataclasses.replace(config, **filled)


def _list_optional_sections(section: Section, prefix: str = "") -> list[str]:
    """Returns the full names of the sections inside a section that can be switched off, at any depth."""
    found = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            found += [prefix + field.name] if value.optional else []
            found += _list_optional_sections(value, f"{prefix}{field.name}.")
    return found


def _make_plain(value: Any) -> Any:
    """Returns the value of a setting as a config file has it: lists in place of tuples, at any depth."""
    return [_make_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _read_number(text: str) -> float | None:
    """Returns the number that a text spells; None if it spells none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number


def _read_command(command: str) -> Mapping[str, str]:
    """Returns the settings that a recorded command names, by full name, with their values as text."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return {}
    given = split_args(words)[1]
    return {flag.name: " ".join(flag.values) for flag in given if flag.name not in _COMMAND_FLAGS}
