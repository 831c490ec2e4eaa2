"""From a recipe's name and command-line flags to a complete, checked `RunConfig`.

    config = load("quickstart", ["--steps", "50", "--algo", "dr_grpo", "--algo.kl.weight", "0.01"])

`--task`, `--turns`, `--algo` and `--engine` choose a variant by name; the chosen one starts from its own defaults, and
only its fields can be set.
"""

from __future__ import annotations

import dataclasses
import keyword
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import tyro

from cohort.config import flags
from cohort.config.document import diff, dump, find_variant, parse, variant_name
from cohort.config.lookup import find_recipe, find_task, task_spec
from cohort.config.rules import reward_parts, validate
from cohort.config.schema import VARIANTS, RunConfig
from cohort.errors import ConfigError
from cohort.tasks.base import task_names

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

_KINDS = ("task", *VARIANTS)
_PREFIX = "choose_"


def load(recipe: str, args: Sequence[str] = ()) -> RunConfig:
    """The recipe's config with the flags in `args` applied, checked."""
    return change(_base(recipe), args)


def change(config: RunConfig, args: Sequence[str] = ()) -> RunConfig:
    """`config` with the flags in `args` applied, every part of the reward weighted, checked."""
    words, given = flags.split(args)
    if words:
        raise ConfigError(f'unexpected "{words[0]}"; settings are flags, such as --steps 100.')
    config = _choose(config, given)
    if config.task is None:
        raise ConfigError("the config has no task; give it one, for example task=Arithmetic().")
    settings = _settings(config)
    valid = flags.leaves(settings)
    for flag in given:  # choices were applied above, but repeating one is still an error
        if flag.name in _KINDS:
            flags.check([f for f in given if f.name == flag.name], valid)
    settings = flags.read(settings, [f for f in given if f.name not in _KINDS], _prog(config.recipe))
    config = _config(settings)
    validate(config, {flag.name for flag in given})
    return config


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
        raise ConfigError(f"recipe {recipe} returned a {type(config).__name__}; it must return a RunConfig.")
    return dataclasses.replace(config, recipe=name)


def _choose(config: RunConfig, given: Collection[flags.Flag]) -> RunConfig:
    """Apply `--task`, `--turns`, `--algo` and `--engine`."""
    for flag in given:
        if flag.name not in _KINDS or len(flag.values) != 1:
            continue
        name = flag.values[0]
        cls = find_variant(flag.name, name)
        if type(getattr(config, flag.name)) is cls:
            continue
        changes: dict[str, Any] = {flag.name: cls()}
        if flag.name == "task":
            changes["reward"] = {}  # the weights were for the other task's parts
        config = dataclasses.replace(config, **changes)
    return config


def _settings(config: RunConfig) -> Any:
    """`config` as a class made for it: variants at their exact type, a field for each part of the reward."""
    choices = {"task": task_names(), **VARIANTS}
    fields: list[Any] = [("recipe", tyro.conf.Suppress[str], config.recipe)]
    for kind in _KINDS:
        name = variant_name(kind, getattr(config, kind))
        names = tuple(dict.fromkeys([*choices[kind], name]))
        arg = tyro.conf.arg(name=kind, help=f"Choose the {kind} by name; it starts from its own defaults.")
        fields.append((_PREFIX + kind, Annotated[Literal[names], arg], name))
        value = getattr(config, kind)
        about = tyro.conf.arg(help=(type(value).__doc__ or "").strip())
        fields.append((kind, Annotated[type(value), about], _fixed(value)))
    weights = _weights(config)
    fields.append(("reward", type(weights), _fixed(weights)))
    made = {name for name, *_ in fields}
    same = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in made}
    cls = dataclasses.make_dataclass("Settings", fields, bases=(RunConfig,), frozen=True, kw_only=True)
    return cls(**same)


def _fixed(value: Any) -> Any:
    """A dataclass field whose default is `value`."""
    return dataclasses.field(default_factory=lambda: value)


def _weights(config: RunConfig) -> Any:
    """The reward's weights as a record with one field a part."""
    parts = reward_parts(config.task)
    for part in parts:
        if not part.isidentifier() or keyword.iskeyword(part):
            raise ConfigError(f'task {type(config.task).name}: reward part "{part}" must be a plain word.')
    fields = [(part, float, config.reward.get(part, 1.0)) for part in parts]
    unknown = set(config.reward) - set(parts)
    if unknown:
        validate(config)  # says so
    return dataclasses.make_dataclass("Reward", fields, frozen=True, kw_only=True)()


def _config(settings: Any) -> RunConfig:
    values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(RunConfig)}
    values["reward"] = dataclasses.asdict(values["reward"])
    return RunConfig(**values)
