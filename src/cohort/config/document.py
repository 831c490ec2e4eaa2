"""A config as text and back: the `config.yaml` of a run holds every value that acts, and nothing secret.

`parse` is the exact inverse of `dump`; it accepts no key it does not know and no value of another type. What is off
(adapters, replay, KL, correction) is not written, and a section that can be off and is missing is off. A setting
that a section did not have when the file was written takes its default, and a warning says so: the default of a new
setting must be what was done before there was a choice. Any other section that is missing is damage.

Formats: 1 had no `format` and no `kind`, was always of the kind `rl`, and held the settings of what was off, too.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import types
import typing
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from cohort.config.flags import describe, leaves
from cohort.config.kinds import KINDS, VARIANTS
from cohort.config.lookup import find_task, task_spec
from cohort.config.names import with_current_settings
from cohort.config.schema import RunConfig
from cohort.config.section import Section, sections, tidied
from cohort.errors import ConfigError, nearest
from cohort.tasks.base import task_names

FORMAT = 2

log = logging.getLogger(__name__)

_SECRET_NAME = re.compile(r"(api_?key|secret|passw(or)?d|credential|(access|auth|hf|bearer)_token)", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"://[^/\s]*:[^/\s]*@")


def variant_name(field: str, value: Any) -> str:
    """The name under which a variant of `task`, `turns`, `algo` or `engine` is chosen."""
    if field == "task":
        return task_spec(value)
    names = {cls: name for name, cls in VARIANTS[field].items()}
    if type(value) not in names:
        raise ConfigError(f"{field} is a {type(value).__name__}, which is not registered.{nearest('', names.values())}")
    return names[type(value)]


def variant_names(field: str) -> list[str]:
    """The names among which a variant can be chosen; of tasks those that are registered."""
    return task_names() if field == "task" else list(VARIANTS[field])


def find_variant(field: str, name: str) -> type[Any]:
    """The class of the variant `name`."""
    if field == "task":
        return find_task(name)
    registry = VARIANTS[field]
    if name not in registry:
        raise ConfigError(f'unknown {field} "{name}".{nearest(name, registry)}')
    return registry[name]


def dump(config: RunConfig) -> str:
    """The config as YAML: every value that acts, variants with their name."""
    tree: dict[str, Any] = {"format": FORMAT, "kind": config.kind}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in config.variants:
            tree[field.name] = {"name": variant_name(field.name, value), **_plain(value, field.name)}
        elif _acts(config, field.name):
            tree[field.name] = _plain(value, field.name)
    # not allow_unicode: PyYAML writes some control characters raw then, and reads them back as spaces
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=False, width=110)


def _acts(owner: Any, name: str) -> bool:
    """Whether the field of a section or config says anything: not where it is a section that is off."""
    value = getattr(owner, name)
    unused = isinstance(owner, RunConfig) and name in owner.unused
    return not unused and (not isinstance(value, Section) or value.on)


def _plain(value: Any, path: str) -> Any:
    """Dataclasses, tuples and numbers as what YAML has; refuses what must not or cannot be written."""
    if _SECRET_NAME.search(path.rpartition(".")[2]):
        raise ConfigError(f"{path} looks like a secret, and a config is written to disk; read it from the environment.")
    if isinstance(value, str) and _SECRET_VALUE.search(value):
        raise ConfigError(f"{path} holds a password in an address, and a config is written to disk; remove it.")
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if _acts(value, f.name)]
        return {name: _plain(getattr(value, name), f"{path}.{name}") for name in names}
    if isinstance(value, dict):
        return {key: _plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, path) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ConfigError(f"{path} is a {type(value).__name__}; settings are numbers, text, None and tuples of these.")


def parse(text: str, source: str = "config.yaml", warn: bool = True) -> RunConfig:
    """The config that `dump` wrote."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
        raise ConfigError(f"{source}, line {line}: not valid YAML; restore the file the run wrote.") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{source} is not a Cohort config; restore the file the run wrote.")
    cls = _kind(tree, source)
    tree = with_current_settings(tree)
    hints = typing.get_type_hints(cls)
    for field in cls.variants:
        section = tree.get(field)
        if not isinstance(section, dict) or not isinstance(section.get("name"), str):
            raise ConfigError(f"{source}: {field}.name is missing; restore the file the run wrote.")
        hints[field] = find_variant(field, section.pop("name"))
    for name in (f.name for f in dataclasses.fields(cls)):
        if name not in tree and name not in cls.unused and not getattr(hints[name], "optional", False):
            raise ConfigError(f"{source}: {name} is missing; restore the file the run wrote.")
    config: RunConfig = _record(cls, tree, "", hints, source)
    config = tidied(config)
    lacking = [name for name in written(config) if not _is_in(tree, name)]
    if lacking and warn:
        taken = ", ".join(f"{name} = {leaves(config)[name].value!r}" for name in lacking)
        log.warning("%s is of an earlier version of Cohort; what it does not say is taken as %s", source, taken)
    return config


def format_of(text: str) -> int:
    """The format of a file that `parse` has accepted."""
    return int(yaml.safe_load(text).get("format", 1))


def _kind(tree: dict[str, Any], source: str) -> type[RunConfig]:
    """The kind a file names, after its format is known to be one that can be read; takes both from the tree."""
    number = tree.pop("format", 1)
    if type(number) is not int or number < 1:
        raise ConfigError(f"{source}: format must be a whole number above 0, not {number!r}.")
    if number > FORMAT:
        raise ConfigError(f"{source} has format {number}, this Cohort knows {FORMAT}: upgrade Cohort.")
    name = tree.pop("kind", "rl" if number == 1 else None)
    if not isinstance(name, str) or name not in KINDS:
        raise ConfigError(f"{source}: kind is {name!r}.{nearest(str(name), KINDS)}")
    if number == 1:
        tree |= {name: dict(section) for name, section in KINDS[name].since_format_1.items() if name not in tree}
    return KINDS[name]


def written(config: RunConfig) -> dict[str, Any]:
    """The values that config.yaml holds, by dotted name."""
    off = [prefix for prefix, section in sections(config) if not section.on]
    off += [f"{name}." for name in config.unused]
    return {name: leaf.value for name, leaf in leaves(config).items() if not name.startswith(tuple(off))}


def _is_in(tree: Any, name: str) -> bool:
    """Whether a setting stands in the file: its dotted name leads to a value."""
    for part in name.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def _record(cls: type[Any], tree: Any, path: str, hints: dict[str, Any], source: str) -> Any:
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: {path.rstrip('.')} must be a section, not {tree!r}.")
    names = [f.name for f in dataclasses.fields(cls)]
    for key in tree:
        if key not in names:
            raise ConfigError(f"{source}: unknown setting {path}{key}.{nearest(str(key), names)}")
    for field in dataclasses.fields(cls):  # of a user's task; all of ours have defaults
        if field.name not in tree and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{source}: {path}{field.name} is missing; restore the file the run wrote.")
    return cls(**{name: _value(value, hints[name], path + name, source) for name, value in tree.items()})


def _value(value: Any, hint: Any, path: str, source: str) -> Any:
    """`value` checked against its type; lists become tuples, whole numbers floats where one is wanted."""
    origin, inner = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _record(typing.cast(type, hint), value, path + ".", typing.get_type_hints(hint), source)
    if origin is dict and isinstance(value, dict):
        return {_value(k, inner[0], path, source): _value(v, inner[1], f"{path}.{k}", source) for k, v in value.items()}
    if origin is tuple and isinstance(value, list):
        types_ = [inner[0]] * len(value) if inner[-1] is ... else list(inner)
        if len(types_) == len(value):
            return tuple(_value(item, t, path, source) for item, t in zip(value, types_, strict=True))
    if origin is list and isinstance(value, list):
        return [_value(item, inner[0], path, source) for item in value]
    if origin in (Union, types.UnionType):
        for option in inner:
            if type(value) is option:
                return value
        if type(value) is int and float in inner:
            return float(value)
    elif origin is Literal and value in inner:
        return value
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif type(value) is hint:
        return value
    raise ConfigError(f"{source}: {path} must be {describe(hint)}, not {value!r}.")


def diff(a: RunConfig, b: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, by dotted name, as (in a, in b); a variant counts as name and fields."""
    flat = []
    for config in (tidied(a), tidied(b)):
        values = {name: leaf.value for name, leaf in leaves(config).items()}
        values |= {field: variant_name(field, getattr(config, field)) for field in config.variants}
        flat.append({"kind": config.kind} | values)
    old, new = flat
    names = [*old, *(name for name in new if name not in old)]
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}
