"""The text form of a config, which is the file `config.yaml` of a run, and the comparison of two configs.

The file has every setting that has an effect, and no secrets. `parse_config` is the exact inverse of `dump_config`. It
refuses unknown keys and values of the wrong type. Five rules for what a file does not contain:

- A section that is off (adapters, replay, KL, correction) is not written. If such a section is missing, it is off. So
  are settings that belong to something that is off, such as engines in other processes.
- A setting that was added to a section after the file was written gets its default, with a warning. So the default of
  a new setting must give what Cohort did before the setting existed.
- So does a setting outside of all sections that `RunConfig.added` names.
- Any other missing section or setting means that the file is damaged.
- Format 1 has no `format` and no `kind` (it is always `rl`), and it has the settings of sections that are off.

Format 3 differs from 2 by run.db alone, which has the turns of samples.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from cohort.config.flags import collect_settings
from cohort.config.kinds import KINDS, VARIANTS
from cohort.config.names import move_old_settings
from cohort.config.recorded import get_recorded_name, make_recorded_class
from cohort.config.schema import RunConfig
from cohort.config.section import Section, reset_inactive_sections, walk_sections
from cohort.config.values import describe_type
from cohort.config.yaml_text import dump_yaml, read_yaml
from cohort.errors import ConfigError, suggest_name
from cohort.tasks.base import choose_class
from cohort.user_code import report_errors

# What a command line calls a variant that is not chosen, such as the task of a run that measures no accuracy.
NO_VARIANT = "none"
# The format that `dump_config` writes. Every earlier format can be read.
FORMAT = 3

log = logging.getLogger(__name__)

# Names and values of settings that are never written to disk. The last matches http://user:password@host.
_SECRET_NAME = re.compile(r"(api_?key|secret|passw(or)?d|credential|(access|auth|hf|bearer)_token)", re.IGNORECASE)
# The same name as a key in the settings of a mixture's task, which are JSON.
_SECRET_KEY = re.compile(rf'"[^"]*{_SECRET_NAME.pattern}[^"]*"(?=\s*:)', re.IGNORECASE)
_SECRET_VALUE = re.compile(r"://[^/\s]*:[^/\s]*@")


def get_variant_name(field: str, value: Any) -> str:
    """Returns the name by which the flag `--FIELD` chooses the class of `value`, for example "grpo" for a GRPO.

    `field` is a field with variants: `task`, `turns`, `algo`, `engine` or `data`. For a class in a user's file the name
    is `/path/to/file.py:name`; for None it is NO_VARIANT. Raises a ConfigError for a class that is not registered, or
    that is in no file.
    """
    if value is None:
        return NO_VARIANT
    return get_recorded_name(value) or VARIANTS[field].make_spec(type(value))


def list_variant_names(field: str) -> list[str]:
    """Returns the names that the flag `--FIELD` accepts, such as the algorithms for "algo".

    `file.py:name`, which the flags of tasks and algorithms accept too, is not among them.
    """
    return VARIANTS[field].list_names()


def find_variant(field: str, name: str) -> type[Any]:
    """Returns the class that the flag `--FIELD` chooses by `name`. Raises a ConfigError if there is none.

    For a task or an algorithm, `name` may be `file.py:name`; that file is run.
    """
    found: type[Any] = VARIANTS[field].find(name)
    return found


VariantFinder = Callable[[str, str, Mapping[str, Any]], type[Any]]
"""(field, name, settings) of a variant in a config file -> its class."""


def load_variant(field: str, name: str, settings: Mapping[str, Any]) -> type[Any]:
    """Returns the class that a config file names, as `find_variant` does: it runs the file that `name` may contain.

    A task whose fields depend on some of its settings has those of the file.
    """
    cls = find_variant(field, name)
    return choose_class(cls, settings) if field == "task" else cls


def keep_recorded(field: str, name: str, settings: Mapping[str, Any]) -> type[Any]:
    """Returns the class that a config file names if it is built-in, else one that is made of its recorded settings.

    It runs no foreign code, and `name` need not exist any more. Raises a ConfigError for settings that cannot be
    fields.
    """
    found = find_variant(field, name) if VARIANTS[field].is_known(name) else None
    # A task whose fields depend on its settings may need a package to know them.
    if found is None or hasattr(found, "choose_class"):
        return make_recorded_class(field, name, settings)
    # A mixture names further tasks, which may be in files of users.
    is_known = all(VARIANTS[field].is_known(spec) for spec in list_mixed_specs(found, settings))
    return found if is_known else make_recorded_class(field, name, settings)


def list_mixed_specs(cls: type[Any], settings: Mapping[str, Any]) -> list[str]:
    """Returns the names of further classes that the settings of a variant contain: those of the tasks of a mixture."""
    specs: list[str] = cls.list_specs(settings) if hasattr(cls, "list_specs") else []
    return specs


def reuse_variants(config: RunConfig) -> VariantFinder:
    """Returns a finder that takes a class with a name of its own from `config` where that has the same name.

    The files may differ: a file can be moved. All else is found by `keep_recorded`. So no foreign code is run.
    """

    def find(field: str, name: str, settings: Mapping[str, Any]) -> type[Any]:
        """Returns the class of `config` if the last parts of both names are equal, else what was recorded."""
        value = getattr(config, field, None)
        if value is not None and get_variant_name(field, value).rpartition(":")[2] == name.rpartition(":")[2]:
            # A mixture may name files. Those that `config` names too may run.
            own = list_mixed_specs(type(value), {"tasks": getattr(value, "tasks", ())})
            if all(VARIANTS[field].is_known(spec) or spec in own for spec in list_mixed_specs(type(value), settings)):
                return type(value)
        return keep_recorded(field, name, settings)

    return find


def dump_config(config: RunConfig) -> str:
    """Returns the config as YAML text, the content of config.yaml. It writes no file.

    Left out are sections that are off, variants that are not chosen and fields without effect in this kind of run.
    Raises a ConfigError for secrets (names such as `api_key`, and addresses with a password) and for values that
    config.yaml cannot hold.
    """
    tree: dict[str, Any] = {"format": FORMAT, "kind": config.kind}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in config.optional_variants and value is None:
            continue
        if field.name in config.variants:
            tree[field.name] = {"name": get_variant_name(field.name, value), **_make_plain(value, field.name)}
        elif _is_written(config, field.name):
            tree[field.name] = _make_plain(value, field.name)
    return dump_yaml(tree)


def _is_written(owner: Any, name: str) -> bool:
    """Returns whether `dump_config` writes the field `name` of `owner`, a config or one of its sections.

    Not written are sections that are off, and settings of a section that belong to something that is off.
    """
    value = getattr(owner, name)
    is_off = isinstance(value, Section) and not value.is_on
    return not is_off and not (isinstance(owner, Section) and name in owner.off_settings)


def _make_plain(value: Any, path: str) -> Any:
    """Returns `value` as dicts, lists, numbers, texts, truth values and None. Dataclasses become dicts, tuples lists.

    `path` is its full name, such as `optim.lr`, for messages and to find secrets by their name. Sections inside it that
    are off are left out. Raises a ConfigError for secrets and for values of other types.
    """
    if _SECRET_NAME.search(path.rpartition(".")[2]):
        raise ConfigError(
            f"the setting {path} looks like a secret by its name, and settings are written to disk. Remove it and read "
            "the secret from an environment variable; if it is no secret, rename it."
        )
    if isinstance(value, str) and _SECRET_VALUE.search(value):
        raise ConfigError(
            f"the setting {path} has a password in an address, and settings are written to disk. Remove the password "
            "from the address."
        )
    if path == "task.tasks" and isinstance(value, str) and (found := _SECRET_KEY.search(value)):
        raise ConfigError(
            f"the setting {found[0]} of a task in {path} looks like a secret by its name, and settings are written to "
            "disk. Remove it and read the secret from an environment variable; if it is no secret, rename it."
        )
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if _is_written(value, f.name)]
        return {name: _make_plain(getattr(value, name), f"{path}.{name}") for name in names}
    if isinstance(value, dict):
        return {key: _make_plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_make_plain(item, path) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ConfigError(
        f"the setting {path} is a {type(value).__name__}, which config.yaml cannot hold. Convert it in the recipe or "
        "task to a plain number, text, truth value or None, or to a tuple or dict of these."
    )


def parse_config(
    text: str, source: str = "config.yaml", warn: bool = True, find: VariantFinder = load_variant
) -> RunConfig:
    """Returns the config whose text `dump_config` wrote, also that of earlier versions of Cohort.

    `source` is the name of the file in messages. With `warn`, a warning is logged that names the settings that the file
    does not have and their defaults. Sections that are off have their defaults. `find` finds the classes that the file
    names; by default, the files of a user's task and algorithm are run. Raises a ConfigError if the text is damaged,
    has unknown settings or values of the wrong type, or is from a later version, and a TaskError for settings that the
    task refuses. Bounds and rules are not checked.
    """
    tree = read_yaml(text, source)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{source} is empty or has no keys, so it is not a Cohort config; restore the file from a copy."
        )
    cls = _pop_kind(tree, source)
    tree = move_old_settings(tree)
    hints = typing.get_type_hints(cls)
    # The type of a variant is known only from the name in the file.
    for field in cls.variants:
        if field in cls.optional_variants and field not in tree:
            continue
        section = tree.get(field)
        if not isinstance(section, dict) or not isinstance(section.get("name"), str):
            raise ConfigError(
                f"{source}: {field}.name is missing or not a text; restore the file from a copy, or add a name as "
                f"in --{field}."
            )
        hints[field] = find(field, section.pop("name"), section)
    for name in (f.name for f in dataclasses.fields(cls)):
        may_lack = name in (*cls.added, *cls.optional_variants) or getattr(hints[name], "optional", False)
        if name not in tree and not may_lack:
            raise ConfigError(
                f"{source}: the key {name} is missing; restore the file from a copy, or add the key and its value."
            )
    config: RunConfig = _build_record(cls, tree, "", hints, source)
    config = reset_inactive_sections(config)
    # Settings that were added to Cohort after the file was written.
    missing = [name for name in collect_written_settings(config) if not _has_setting(tree, name)]
    if missing and warn:
        defaults = ", ".join(f"{name} = {collect_settings(config)[name].value!r}" for name in missing)
        log.warning("%s is from an earlier version of Cohort. Settings that it does not have: %s", source, defaults)
    return config


def read_format(text: str) -> int:
    """Returns the format number of the config file `text`, which `parse_config` has accepted.

    It is 1 for texts without a number.
    """
    return int(read_yaml(text, "config.yaml").get("format", 1))


def _pop_kind(tree: dict[str, Any], source: str) -> type[RunConfig]:
    """Removes `format` and `kind` from `tree`, the dict of a config file, and returns the config class of that kind.

    If the format is 1, also adds the sections that this format does not have to `tree`. `source` is the file in
    messages. Raises a ConfigError for formats of later versions, invalid ones and unknown kinds.
    """
    number = tree.pop("format", 1)
    if type(number) is not int or number < 1:
        raise ConfigError(
            f"{source}: format must be a whole number above 0, not {number!r}; correct it, or restore the file "
            "from a copy."
        )
    if number > FORMAT:
        raise ConfigError(
            f"{source} has format {number}, but this version of Cohort reads formats up to {FORMAT}; upgrade Cohort."
        )
    name = tree.pop("kind", "rl" if number == 1 else None)
    if not isinstance(name, str) or name not in KINDS:
        raise ConfigError(
            f"{source}: unknown kind of run {name!r}.{suggest_name(str(name), KINDS)} Correct or add the key kind "
            "in the file."
        )
    # Sections that later formats have, with what Cohort did before they existed.
    if number == 1:
        tree |= {name: dict(section) for name, section in KINDS[name].since_format_1.items() if name not in tree}
    return KINDS[name]


def collect_written_settings(config: RunConfig) -> dict[str, Any]:
    """Returns the value of every setting that `dump_config` writes, by full name such as `optim.lr`.

    Settings of sections that are off are left out. So are `format`, `kind` and the names of chosen classes such as the
    algorithm, which the file has besides.
    """
    off = [prefix for prefix, section in walk_sections(config) if not section.is_on]
    unwritten = {f"{prefix}{name}" for prefix, section in walk_sections(config) for name in section.off_settings}
    settings = collect_settings(config).items()
    return {
        name: setting.value
        for name, setting in settings
        # A variant that is not chosen stands here itself, because it has no settings.
        if not name.startswith(tuple(off)) and name not in unwritten and name not in config.variants
    }


def _has_setting(tree: Any, name: str) -> bool:
    """Returns whether the nested dicts of a config file contain the setting with the full name `name`.

    >>> _has_setting({"optim": {"lr": 0.1}}, "optim.lr")
    True
    """
    for part in name.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def _build_record(cls: type[Any], tree: Any, path: str, hints: dict[str, Any], source: str) -> Any:
    """Returns an instance of the dataclass `cls` with the values in the dict `tree`.

    Fields that `tree` lacks get their defaults. `hints` has the types of the fields by name. `path` is the prefix of
    their full names, such as `optim.`, and `source` is the file, both for messages. Raises a ConfigError for unknown
    keys, missing fields without default and values of the wrong type.
    """
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{source}: {path.rstrip('.')} must be a section of keys and values, not {tree!r}; correct it, or restore "
            "the file from a copy."
        )
    names = [f.name for f in dataclasses.fields(cls)]
    for key in tree:
        if key not in names:
            raise ConfigError(
                f"{source}: unknown setting {path}{key}.{suggest_name(str(key), names)} Correct or remove it, or "
                "upgrade Cohort if a later version wrote the file."
            )
    # Only the tasks of users can have fields without default. All classes of Cohort have defaults.
    for field in dataclasses.fields(cls):
        if field.name not in tree and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(
                f"{source}: {path}{field.name} is missing and has no default; add it to the file, or give it a default "
                "in the task."
            )
    values = {name: _convert_value(value, hints[name], path + name, source) for name, value in tree.items()}
    with report_errors(f"the class {cls.__name__}, made with the settings in {source},", cls):
        return cls(**values)


def _convert_value(value: Any, hint: Any, path: str, source: str) -> Any:
    """Returns `value` of a config file as the type `hint`.

    Where `hint` asks for it, dicts become dataclasses, lists become tuples and whole numbers become floats, at any
    depth. Nothing else is converted: True is no whole number, and "5" is no number. Raises a ConfigError if the value
    does not have that type; it names the file `source` and the full name `path` of the setting.
    """
    origin = get_origin(hint)
    inner = get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build_record(typing.cast(type, hint), value, path + ".", typing.get_type_hints(hint), source)
    if origin is dict and isinstance(value, dict):
        return {
            _convert_value(k, inner[0], path, source): _convert_value(v, inner[1], f"{path}.{k}", source)
            for k, v in value.items()
        }
    if origin is tuple and isinstance(value, list):
        types_ = [inner[0]] * len(value) if inner[-1] is ... else list(inner)
        # With another number of values the error at the end follows.
        if len(types_) == len(value):
            return tuple(_convert_value(item, t, path, source) for item, t in zip(value, types_, strict=True))
    if origin is list and isinstance(value, list):
        return [_convert_value(item, inner[0], path, source) for item in value]
    # Of the types in a union the exact one is preferred, so that 5 stays a whole number in `int | float`.
    if origin in (Union, types.UnionType):
        for option in inner:
            if type(value) is option:
                return value
        if type(value) is int and float in inner and abs(value) < 1 << 1023:
            return float(value)
    elif origin is Literal and value in inner:
        return value
    # A whole number of more than 308 digits is too large for a float.
    elif hint is float and (type(value) is float or (type(value) is int and abs(value) < 1 << 1023)):
        return float(value)
    elif type(value) is hint:
        return value
    raise ConfigError(
        f"{source}: {path} must be {describe_type(hint)}, not {value!r}; correct it, or restore the file from a copy."
    )


def diff_configs(a: RunConfig, b: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the settings that differ between two configs, by full name, as (value in a, value in b); {} if none.

    None stands for a setting that one of them does not have. The name of a chosen class counts as a setting, such as
    `algo` with the value "grpo", and so does `kind`.
    Differences in sections that are off do not count.
    """
    both = []
    for config in (reset_inactive_sections(a), reset_inactive_sections(b)):
        values = {name: setting.value for name, setting in collect_settings(config).items()}
        values |= {field: get_variant_name(field, getattr(config, field)) for field in config.variants}
        both.append({"kind": config.kind} | values)
    old, new = both
    names = [*old, *(name for name in new if name not in old)]
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}
