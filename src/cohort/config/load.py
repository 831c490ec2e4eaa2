"""The loader of configs: from a recipe's name and command-line flags to a complete and checked config.

    config = load_config("quickstart", ["--steps", "50", "--algo", "dr_grpo", "--algo.kl.weight", "0.01"])

`--task`, `--turns`, `--algo` and `--engine` choose a variant by name. The chosen variant starts from its own defaults,
and only its fields can be set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from cohort.config import flags
from cohort.config.document import (
    NO_VARIANT,
    diff_configs,
    dump_config,
    find_variant,
    get_variant_name,
    list_variant_names,
    parse_config,
)
from cohort.config.flags import Flag, GivenSetting, PythonSetting, collect_given_values
from cohort.config.help import print_settings_help
from cohort.config.hints import find_algorithm_remedy
from cohort.config.lookup import find_recipe, find_task
from cohort.config.rules import validate
from cohort.config.schema import RunConfig
from cohort.config.section import reset_inactive_sections
from cohort.errors import ConfigError
from cohort.system.paths import expand_home
from cohort.tasks.base import choose_task, make_with_defaults
from cohort.tasks.parts import is_computed
from cohort.user_code import load_plugins, report_errors

__all__ = [
    "change_config",
    "diff_configs",
    "dump_config",
    "find_task",
    "load_config",
    "parse_config",
    "print_help",
    "validate",
]

C = TypeVar("C", bound=RunConfig)

# The settings record has a field `choose_algo` for the name of the variant, beside the field `algo` for its settings.
_PREFIX = "choose_"


def load_config(
    recipe: str, args: Sequence[str] = (), given: Sequence[GivenSetting] | Mapping[str, Any] = ()
) -> RunConfig:
    """Returns the config of `recipe`, changed by `args` and `given`, and checked.

    `recipe` is a name, `file.py:function`, or the path of a config.yaml that a run wrote. `args` are words of a command
    line; `given` are settings that were read already, or values by full name, such as {"optim.lr": 1e-4}. Raises a
    ConfigError for unknown recipes and settings, wrong values, and settings that contradict each other or have no
    effect, a UserCodeError if a user's file raises, and a TaskError for a setting that a task refuses.
    """
    return change_config(call_recipe(recipe), args, given, is_recorded=is_config_file(recipe))


def change_config(
    config: C,
    args: Sequence[str] = (),
    given: Sequence[GivenSetting] | Mapping[str, Any] = (),
    *,
    is_recorded: bool = False,
) -> C:
    """Returns a copy of `config` changed by `args` and `given`, and checked.

    `args` are words of a command line such as ["--steps", "50"]; `given` are settings that were read already, or values
    by full name. A setting such as `algo` that chooses another class starts from that class's defaults. In the result,
    every reward part has a coefficient, and sections that are off have their defaults. `is_recorded` = the config is
    one that a run recorded, not one of a recipe. Raises a ConfigError for unknown settings, wrong values and settings
    that contradict each other or have no effect; also without any settings.
    """
    words, user_flags = flags.split_args(args)
    items = [PythonSetting(_clean_name(k), v) for k, v in given.items()] if isinstance(given, Mapping) else list(given)
    items = [*user_flags, *items]
    config = _apply_variants(config, items)
    config.require_complete()
    config = _apply_task_settings(config, items)
    settings = _make_settings_record(config)
    valid = flags.collect_settings(settings)
    for word in words:
        flags.raise_if_misplaced(word, valid)
        raise ConfigError(
            f'unexpected word "{word}". Remove it, or write settings as flags with two dashes, for example --steps 100.'
        )
    items = flags.merge_repeated(items, valid)
    # Settings can be read only now: which ones exist depends on the chosen variants. The variants themselves are
    # applied already; here they are checked: each must be given once and with one value.
    flags.check_given(items, valid)
    for item in items:
        if item.name in config.variants:
            # A name was found already. It may be written otherwise than it is recorded: file.py:name.
            is_text = isinstance(item, Flag) or isinstance(item.value, str)
            item.read_value(dataclasses.replace(valid[item.name], type=str) if is_text else valid[item.name])
    settings = flags.apply_settings(settings, [item for item in items if item.name not in config.variants])
    config = _make_config(config, settings)
    validate(config, {item.name for item in items}, is_recorded=is_recorded)
    return reset_inactive_sections(config)


def _clean_name(name: str) -> str:
    """Returns the full name of a setting that a caller in Python wrote, perhaps as a flag with dashes."""
    return str(name).removeprefix("--").replace("-", "_")


def print_help(recipe: str, args: Sequence[str] = ()) -> None:
    """Prints the help of `cohort train RECIPE`: every setting with its default in the recipe.

    If `args` chooses a variant, such as `--algo dapo`, its settings are printed. All other flags in `args` are ignored.
    Raises a ConfigError for an unknown recipe or variant.
    """
    user_flags = flags.split_args(args)[1]
    config = _apply_task_settings(_apply_variants(call_recipe(recipe), user_flags), user_flags)
    # Which flags there are depends on the task.
    config.require_complete()
    # Their names are among those that flags can choose.
    load_plugins()
    # The first line of the recipe's docstring introduces the help.
    lines = [] if is_config_file(recipe) else (find_recipe(recipe)[1].__doc__ or "").strip().splitlines()
    about = f"{lines[0]} " if lines else ""
    description = f"{about}Also: --out DIR (default runs), --log live|plain|json, --sinks NAME,..."
    print_settings_help(_make_settings_record(config), _make_program_name(recipe), description)


def _make_program_name(recipe: str) -> str:
    """Returns the command that the help shows, such as "cohort train quickstart"."""
    return f"cohort train {recipe}"


def call_recipe(recipe: str) -> RunConfig:
    """Returns the config of a recipe (a name or `file.py:function`) without flags, with its name in `config.recipe`.

    A config.yaml keeps the name of the recipe that it was made from. Raises a ConfigError if there is no such recipe or
    file, or if it does not give a config, and a UserCodeError if a user's recipe raises.
    """
    if is_config_file(recipe):
        return _read_config_file(expand_home(recipe))
    name, function = find_recipe(recipe)
    with report_errors(f"the recipe {recipe}", function):
        config: Any = function()
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"the recipe {recipe} returned a {type(config).__name__}, which is no config. Change the function to "
            "return cohort.RL(...) or cohort.SFT(...)."
        )
    return dataclasses.replace(config, recipe=name)


def is_config_file(recipe: str) -> bool:
    """Returns whether the name of a recipe is the path of a config file: it ends in .yaml or .yml."""
    return recipe.endswith((".yaml", ".yml"))


def _read_config_file(path: Path) -> RunConfig:
    """Returns the config in a file that a run wrote. Runs the files of tasks and algorithms that it names.

    Raises a ConfigError if the file cannot be read or is no config.
    """
    if not path.is_file():
        raise ConfigError(f'there is no file "{path}"; name the config.yaml of a run, or a recipe.')
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. Repair its permissions, or restore it from a copy."
        ) from error
    return parse_config(text, str(path))


def _apply_variants(config: C, given: Collection[GivenSetting]) -> C:
    """Returns `config` with the classes that settings such as task, turns, algo and engine choose by name.

    A newly chosen class starts from its own defaults; one that `config` already has keeps its values. A task whose
    fields depend on some of its settings gets those fields. All other settings are ignored, and so are these with
    anything but one text. Raises a ConfigError for an unknown name.
    """
    for item in given:
        values = item.values if isinstance(item, Flag) else (item.value,)
        if item.name not in config.variants or len(values) != 1 or not isinstance(values[0], str):
            continue
        if item.name == "algo" and (remedy := find_algorithm_remedy(values[0])):
            raise ConfigError(f'unknown algo "{values[0]}". {remedy}')
        if values[0] == NO_VARIANT and item.name in config.optional_variants:
            config = config.replace_variant(item.name, None)
            continue
        cls = find_variant(item.name, values[0])
        # Choosing the variant that the recipe has keeps the recipe's values.
        if type(getattr(config, item.name)) is not cls:
            config = config.replace_variant(item.name, make_with_defaults(cls) if item.name == "task" else cls())
    task = getattr(config, "task", None)
    chosen = choose_task(task, collect_given_values(given, "task."))
    # The parts of the reward stay, so their coefficients do too.
    return config if chosen is task else dataclasses.replace(config, **{"task": chosen})


def _apply_task_settings(config: C, given: Sequence[GivenSetting]) -> C:
    """Returns `config` with the settings of a task that decide which reward parts it has: those of a mixture.

    Which flags `--reward.PART` exist is known only then. Coefficients of parts that remain are kept. Other tasks are
    left as they are, and so are unknown settings, which are refused later.
    """
    task = getattr(config, "task", None)
    if task is None or not is_computed(type(task), "parts"):
        return config
    valid = flags.collect_settings(task, "task.")
    own = [item for item in flags.merge_repeated(given, valid) if item.name in valid]
    changed = dataclasses.replace(
        task, **{item.name.removeprefix("task."): item.read_value(valid[item.name]) for item in own}
    )
    if changed == task:
        return config
    coefficients = getattr(config, "reward", None)
    config = config.replace_variant("task", changed)
    if coefficients is None:
        return config
    return dataclasses.replace(config, reward={p: c for p, c in coefficients.items() if p in changed.parts})  # type: ignore[call-arg]


def _make_settings_record(config: RunConfig) -> Any:
    """Returns the values of `config` as an instance of a class that is made for it, from which tyro makes flags.

    The class differs from that of `config` in three ways. Variants have their exact type, so that only their settings
    become flags; one that is not chosen has none. A field `choose_NAME` per variant becomes the flag `--NAME`. Dict
    fields are records.
    """
    fields: list[Any] = [("recipe", tyro.conf.Suppress[str], config.recipe)]
    for field in config.variants:
        value = getattr(config, field)
        name = get_variant_name(field, value)
        # A task in a user's file is not among the registered names.
        none = [NO_VARIANT] if field in config.optional_variants else []
        names = tuple(dict.fromkeys([*none, *list_variant_names(field), name]))
        arg = tyro.conf.arg(name=field, help=f"Choose the {field} by name; it starts from its own defaults.")
        fields.append((_PREFIX + field, Annotated[Literal[names], arg], name))
        if value is None:
            fields.append((field, Annotated[Any, tyro.conf.Suppress], None))
            continue
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
