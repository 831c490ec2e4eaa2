"""From a recipe's name and command-line flags to a complete, checked config.

    config = load("quickstart", ["--steps", "50", "--algo", "dr_grpo", "--algo.kl.weight", "0.01"])

`--task`, `--turns`, `--algo` and `--engine` choose a variant by name; the chosen one starts from its own defaults, and
only its fields can be set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import tyro

from cohort.config import flags
from cohort.config.document import diff, dump, find_variant, parse, variant_name, variant_names
from cohort.config.lookup import find_recipe, find_task, task_spec
from cohort.config.rules import validate
from cohort.config.schema import RunConfig
from cohort.config.section import tidied
from cohort.errors import ConfigError

__all__ = [
    "as_args",
    "change",
    "diff",
    "dump",
    "find_task",
    "load",
    "parse",
    "print_help",
    "task_spec",
    "validate",
]

C = TypeVar("C", bound=RunConfig)

_PREFIX = "choose_"


def load(recipe: str, args: Sequence[str] = ()) -> RunConfig:
    """The recipe's config with the flags in `args` applied, checked."""
    return change(_base(recipe), args)


def change(config: C, args: Sequence[str] = ()) -> C:
    """`config` with the flags in `args` applied, every part of the reward weighted, what is off at rest, checked."""
    words, given = flags.split(args)
    if words:
        raise ConfigError(f'unexpected "{words[0]}"; settings are flags, such as --steps 100.')
    config = _choose(config, given)
    config.require_complete()
    settings = _settings(config)
    valid = flags.leaves(settings)
    for flag in given:  # choices were applied above, but repeating one is still an error
        if flag.name in config.variants:
            flags.check([f for f in given if f.name == flag.name], valid)
    settings = flags.read(settings, [f for f in given if f.name not in config.variants], _prog(config.recipe))
    config = _config(config, settings)
    validate(config, {flag.name for flag in given})
    return tidied(config)


def as_args(settings: Mapping[str, Any]) -> list[str]:
    """Settings by dotted name as flags, for callers in Python.

    >>> as_args({"steps": 5, "sampling.stop": ("a", "b")})
    ['--steps=5', '--sampling.stop', 'a', 'b']
    """
    args: list[str] = []
    for name, value in settings.items():
        many = isinstance(value, tuple | list)
        args += [f"--{name}", *map(str, value)] if many else [f"--{name}={value}"]
    return args


def print_help(recipe: str, args: Sequence[str] = ()) -> None:
    """Every setting of a recipe, with the variants chosen in `args`, on stdout."""
    config = _choose(_base(recipe), flags.split(args)[1])
    _, function = find_recipe(recipe)
    lines = (function.__doc__ or "").strip().splitlines()
    about = f"{lines[0]} " if lines else ""
    described = f"{about}Also: --out DIR (default runs), --log live|plain|json, --sinks NAME,..."
    flags.print_help(_settings(config), _prog(recipe), described)


def _prog(recipe: str) -> str:
    return f"cohort train {recipe}"


def _base(recipe: str) -> RunConfig:
    name, function = find_recipe(recipe)
    config = function()
    if not isinstance(config, RunConfig):
        raise ConfigError(f"recipe {recipe} returned a {type(config).__name__}; it must return a RunConfig: RL(...).")
    return dataclasses.replace(config, recipe=name)


def _choose(config: C, given: Collection[flags.Flag]) -> C:
    """Apply the flags that choose a variant, such as `--task`, `--turns`, `--algo` and `--engine`."""
    for flag in given:
        if flag.name not in config.variants or len(flag.values) != 1:
            continue
        cls = find_variant(flag.name, flag.values[0])
        if type(getattr(config, flag.name)) is not cls:
            config = config.with_variant(flag.name, cls())
    return config


def _settings(config: RunConfig) -> Any:
    """`config` as a class made for it: variants at their exact type, a field for each part of the reward."""
    fields: list[Any] = [("recipe", tyro.conf.Suppress[str], config.recipe)]
    for field in config.variants:
        value = getattr(config, field)
        name = variant_name(field, value)
        names = tuple(dict.fromkeys([*variant_names(field), name]))
        arg = tyro.conf.arg(name=field, help=f"Choose the {field} by name; it starts from its own defaults.")
        fields.append((_PREFIX + field, Annotated[Literal[names], arg], name))
        about = tyro.conf.arg(help=(type(value).__doc__ or "").strip())
        fields.append((field, Annotated[type(value), about], _fixed(value)))
    fields += [(name, type(record), _fixed(record)) for name, record in config.records().items()]
    made = {name for name, *_ in fields}
    same = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in made}
    cls = dataclasses.make_dataclass("Settings", fields, bases=(type(config),), frozen=True, kw_only=True)
    return cls(**same)


def _fixed(value: Any) -> Any:
    """A dataclass field whose default is `value`."""
    return dataclasses.field(default_factory=lambda: value)


def _config(config: C, settings: Any) -> C:
    """The settings as a config of the kind that `config` has."""
    values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(config)}
    values |= {name: dataclasses.asdict(values[name]) for name in config.records()}
    return type(config)(**values)
