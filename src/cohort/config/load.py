"""The loader of configs: from a recipe's name and command-line flags to a complete and checked config.

    config = load_config("quickstart", ["--steps", "50", "--algo", "dr_grpo", "--algo.kl.weight", "0.01"])

`--task`, `--turns`, `--algo` and `--engine` choose a variant by name. The chosen variant starts from its own defaults,
and only its fields can be set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import tyro

from cohort.config import flags
from cohort.config.document import (
    diff_configs,
    dump_config,
    find_variant,
    get_variant_name,
    list_variant_names,
    parse_config,
)
from cohort.config.lookup import find_recipe, find_task, make_task_spec
from cohort.config.rules import validate
from cohort.config.schema import RunConfig
from cohort.config.section import reset_inactive_sections
from cohort.errors import ConfigError

__all__ = [
    "change_config",
    "diff_configs",
    "dump_config",
    "find_task",
    "format_args",
    "load_config",
    "make_task_spec",
    "parse_config",
    "print_help",
    "validate",
]

C = TypeVar("C", bound=RunConfig)

# The settings record has a field `choose_algo` for the name of the variant, beside the field `algo` for its settings.
_PREFIX = "choose_"


def load_config(recipe: str, args: Sequence[str] = ()) -> RunConfig:
    """Returns the config of `recipe` (a name or `file.py:function`), changed by the flags in `args` and checked.

    Raises a ConfigError for unknown recipes and flags, wrong values, and settings that contradict each other or have no
    effect. Errors in a user's file and a TaskError for a setting that a task refuses pass through.
    """
    return change_config(_call_recipe(recipe), args)


def change_config(config: C, args: Sequence[str] = ()) -> C:
    """Returns a copy of `config` changed by the flags in `args`, such as ["--steps", "50"], and checked.

    A flag such as `--algo` that chooses another class starts from that class's defaults. In the result, every reward
    part has a coefficient, and sections that are off have their defaults. Raises a ConfigError for unknown flags, wrong
    values and settings that contradict each other or have no effect; also without any flags.
    """
    words, user_flags = flags.split_args(args)
    if words:
        raise ConfigError(
            f'unexpected argument "{words[0]}"; write settings as flags with two dashes, for example --steps 100.'
        )
    config = _apply_variant_flags(config, user_flags)
    config.require_complete()
    settings = _make_settings_record(config)
    valid = flags.collect_settings(settings)
    # The flags of variants were applied above without a check. They must be given once and with one value.
    for flag in user_flags:
        if flag.name in config.variants:
            flags.check_flags([f for f in user_flags if f.name == flag.name], valid)
    # Settings can be read only now: which ones exist depends on the chosen variants.
    settings = flags.apply_flags(
        settings, [f for f in user_flags if f.name not in config.variants], _make_program_name(config.recipe)
    )
    config = _make_config(config, settings)
    validate(config, {flag.name for flag in user_flags})
    return reset_inactive_sections(config)


def format_args(settings: Mapping[str, Any]) -> list[str]:
    """Returns settings, given as values by full name, as the command-line arguments that set them.

    It lets callers in Python use `load_config`. Names and values are not checked; values are written with `str`.

    >>> format_args({"steps": 5, "sampling.stop": ("a", "b")})
    ['--steps=5', '--sampling.stop', 'a', 'b']
    """
    args: list[str] = []
    for name, value in settings.items():
        many = isinstance(value, tuple | list)
        args += [f"--{name}", *map(str, value)] if many else [f"--{name}={value}"]
    return args


def print_help(recipe: str, args: Sequence[str] = ()) -> None:
    """Prints the help of `cohort train RECIPE`: every setting with its default in the recipe.

    If `args` chooses a variant, such as `--algo dapo`, its settings are printed. All other flags in `args` are ignored.
    Raises a ConfigError for an unknown recipe or variant.
    """
    config = _apply_variant_flags(_call_recipe(recipe), flags.split_args(args)[1])
    _, function = find_recipe(recipe)
    # The first line of the recipe's docstring introduces the help.
    lines = (function.__doc__ or "").strip().splitlines()
    about = f"{lines[0]} " if lines else ""
    description = f"{about}Also: --out DIR (default runs), --log live|plain|json, --sinks NAME,..."
    flags.print_help(_make_settings_record(config), _make_program_name(recipe), description)


def _make_program_name(recipe: str) -> str:
    """Returns the command that the help shows, such as "cohort train quickstart"."""
    return f"cohort train {recipe}"


def _call_recipe(recipe: str) -> RunConfig:
    """Returns the config of a recipe (a name or `file.py:function`) without flags, with its name in `config.recipe`.

    Raises a ConfigError if there is no such recipe or if it does not return a config.
    """
    name, function = find_recipe(recipe)
    config = function()
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"the recipe {recipe} returned a {type(config).__name__}, which is no config. Change the function to "
            "return cohort.RL(...) or cohort.SFT(...)."
        )
    return dataclasses.replace(config, recipe=name)


def _apply_variant_flags(config: C, user_flags: Collection[flags.Flag]) -> C:
    """Returns `config` with the classes that flags such as `--task`, `--turns`, `--algo` and `--engine` choose by name.

    A newly chosen class starts from its own defaults; one that `config` already has keeps its values. All other flags
    are ignored, and so are these flags without exactly one value. Raises a ConfigError for an unknown name.
    """
    for flag in user_flags:
        if flag.name not in config.variants or len(flag.values) != 1:
            continue
        cls = find_variant(flag.name, flag.values[0])
        # Choosing the variant that the recipe has keeps the recipe's values.
        if type(getattr(config, flag.name)) is not cls:
            config = config.replace_variant(flag.name, cls())
    return config


def _make_settings_record(config: RunConfig) -> Any:
    """Returns the values of `config` as an instance of a class that is made for it, from which tyro makes flags.

    The class differs from that of `config` in three ways. Variants have their exact type, so that only their settings
    become flags. A field `choose_NAME` per variant becomes the flag `--NAME`. Dict fields are records.
    """
    fields: list[Any] = [("recipe", tyro.conf.Suppress[str], config.recipe)]
    for field in config.variants:
        value = getattr(config, field)
        name = get_variant_name(field, value)
        # A task in a user's file is not among the registered names.
        names = tuple(dict.fromkeys([*list_variant_names(field), name]))
        arg = tyro.conf.arg(name=field, help=f"Choose the {field} by name; it starts from its own defaults.")
        fields.append((_PREFIX + field, Annotated[Literal[names], arg], name))
        about = tyro.conf.arg(help=(type(value).__doc__ or "").strip())
        fields.append((field, Annotated[type(value), about], _make_default_field(value)))
    fields += [(name, type(record), _make_default_field(record)) for name, record in config.make_flag_records().items()]
    replaced = {name for name, *_ in fields}
    unchanged = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in replaced}
    cls = dataclasses.make_dataclass("Settings", fields, bases=(type(config),), frozen=True, kw_only=True)
    return cls(**unchanged)


def _make_default_field(value: Any) -> Any:
    """Returns a dataclass field, as `dataclasses.field` does, whose default is the object `value` itself."""
    return dataclasses.field(default_factory=lambda: value)


def _make_config(config: C, settings: Any) -> C:
    """Returns the values of `settings`, made by `_make_settings_record`, as a config of the class of `config`.

    The values of `config` itself are not used.
    """
    values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(config)}
    # The records of dict fields become dicts again.
    values |= {name: dataclasses.asdict(values[name]) for name in config.make_flag_records()}
    return type(config)(**values)
