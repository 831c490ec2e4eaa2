"""Settings as users give them, on a command line or in Python, for any dataclass.

Every mistake gets a message of one line that names the setting as the user wrote it and the remedy.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, get_origin

import tyro

from cohort.config.hints import find_remedy, read_misplaced_setting
from cohort.config.names import get_current_setting_name
from cohort.config.section import Bound
from cohort.config.values import (
    WrongTypeError,
    convert_value,
    describe_type,
    parse_texts,
    replace_settings,
    takes_many,
)
from cohort.errors import ConfigError

T = TypeVar("T")

HELP = ("-h", "--help")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a dataclass: its full name such as `algo.clip_high`, type, present value and bounds."""

    name: str
    type: Any
    value: Any
    bounds: tuple[Bound, ...] = ()

    @property
    def takes_many(self) -> bool:
        """Whether the flag of the setting may have several values: its type is a tuple, of any form, or a list."""
        return takes_many(self.type)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag and its values from a command line. `name` is the full name of its setting, such as `algo.clip_high`."""

    name: str
    values: tuple[str, ...]

    @property
    def spelling(self) -> str:
        """The flag as it is written on a command line, such as `--algo.clip-high`."""
        return format_flag(self.name)

    def to_words(self) -> list[str]:
        """Returns the flag and its values as words of a command line. A single value may begin with dashes."""
        if len(self.values) == 1:
            return [f"{self.spelling}={self.values[0]}"]
        return [self.spelling, *self.values]

    def read_value(self, setting: Setting) -> Any:
        """Returns the value that the flag gives its setting.

        Raises a ConfigError for values of the wrong type, and for none or several values where one is needed.
        """
        if not setting.takes_many and len(self.values) != 1:
            got = f"got {len(self.values)}: {' '.join(self.values)}" if self.values else "got none"
            quotes = ", with quotes around a text with spaces" if setting.type in (str, str | None) else ""
            raise ConfigError(
                f"{self.spelling} takes one value ({describe_type(setting.type)}), {got}. Write {self.spelling} VALUE"
                f"{quotes}."
            )
        if setting.takes_many and not self.values and not setting.value:
            raise ConfigError(
                f"{self.spelling} has no effect: it is given without a value, and it is empty anyway. Write "
                f"{self.spelling} VALUE, or remove it."
            )
        try:
            return parse_texts(self.values, setting.type)
        except WrongTypeError:
            text = " ".join(self.values)
            remedy = self._suggest_sweep(setting) or "Correct the value."
            raise ConfigError(
                f'{self.spelling} must be {describe_type(setting.type)}, not "{text}". {remedy}'
            ) from None

    def _suggest_sweep(self, setting: Setting) -> str:
        """Returns the command for several values with commas, if the flag has them and each would be right; else ""."""
        pieces = self.values[0].split(",")
        try:
            for piece in pieces:
                parse_texts([piece], setting.type)
        except WrongTypeError:
            return ""
        # The options of other commands, whose names have no dot, cannot be swept.
        if "." not in self.name and self.name not in ("steps", "seed"):
            return ""
        return f"To train with each of these values, write: cohort sweep RECIPE {self.spelling} {self.values[0]}."

    def make_unknown_error(self, valid: Mapping[str, Any]) -> ConfigError:
        """Returns the error for a flag that is none of `valid`, settings by full name; the caller raises it."""
        return ConfigError(f"unknown flag {self.spelling}. {find_remedy(self.name, valid, format_flag)}")


@dataclass(frozen=True, slots=True)
class PythonSetting:
    """A setting that a caller in Python gives, with its value. `name` is its full name, such as `algo.clip_high`."""

    name: str
    value: Any

    @property
    def spelling(self) -> str:
        """The setting as it is written in Python, such as `settings["algo.clip_high"]`."""
        return f'settings["{self.name}"]'

    def read_value(self, setting: Setting) -> Any:
        """Returns the value as the type of its setting. Raises a ConfigError if it does not have that type."""
        try:
            return convert_value(self.value, setting.type)
        except WrongTypeError:
            raise ConfigError(
                f"{self.spelling} must be {describe_type(setting.type)}, not {self.value!r}. Correct the value."
            ) from None

    def make_unknown_error(self, valid: Mapping[str, Any]) -> ConfigError:
        """Returns the error for a name that is none of `valid`, settings by full name; the caller raises it."""
        inner = [name for name in valid if name.startswith(f"{self.name}.")]
        if inner:
            return ConfigError(
                f"{self.spelling} is a section, not a setting. Give each setting of it by its full name, such as "
                f'"{inner[0]}".'
            )
        return ConfigError(f'unknown setting "{self.name}". {find_remedy(self.name, valid, format_key)}')


GivenSetting = Flag | PythonSetting


def collect_given_values(given: Iterable[GivenSetting], prefix: str) -> dict[str, Any]:
    """Returns the settings whose full names begin with `prefix`, by the rest of their names, unchecked.

    Those of a command line are texts; one with several values, or none, is left out.

    >>> collect_given_values(split_args(["--task.level", "2", "--steps", "5"])[1], "task.")
    {'level': '2'}
    """
    found: dict[str, Any] = {}
    for item in given:
        values = item.values if isinstance(item, Flag) else (item.value,)
        if item.name.startswith(prefix) and len(values) == 1:
            found[item.name.removeprefix(prefix)] = values[0]
    return found


def format_flag(name: str) -> str:
    """Returns the flag for the setting with the full name `name`: `--` and the name with dashes for underscores.

    >>> format_flag("algo.clip_high")
    '--algo.clip-high'
    """
    return "--" + name.replace("_", "-")


def format_key(name: str) -> str:
    """Returns a setting as `cohort.train` takes it: a key of `settings` or, of the command's own flags, an argument.

    >>> format_key("optim.lr"), format_key("out")
    ('"optim.lr"', 'out=')
    """
    return f"{name}=" if name in ("out", "log", "sinks") else f'"{name}"'


# Which settings a config has is asked several times per command, and evaluating the annotations takes the most time.
@lru_cache(maxsize=256)
def _read_field_types(cls: type) -> Mapping[str, Any]:
    """Returns the types of a dataclass's fields by name, with their marks such as bounds."""
    return typing.get_type_hints(cls, include_extras=True)


def collect_settings(config: Any, prefix: str = "") -> dict[str, Setting]:
    """Returns every setting of a dataclass instance and of the dataclasses in it, by full name, in the order of fields.

    A full name is `prefix` and the path to the setting, such as `algo.kl.weight`. A field whose flag has another name
    stands under that name. Each key of a dict counts as a setting of type float. Fields hidden from the command line
    are left out.
    """
    settings: dict[str, Setting] = {}
    hints = _read_field_types(type(config))  # type: ignore[arg-type]  # every class is hashable
    for field in dataclasses.fields(config):
        name = prefix + field.name
        value = getattr(config, field.name)
        hint = hints[field.name]
        hint, marks = (hint.__origin__, hint.__metadata__) if get_origin(hint) is typing.Annotated else (hint, ())
        if tyro.conf.Suppress in marks:
            continue
        # A mark from tyro.conf.arg can give the flag a name other than that of the field.
        renamed = [m.name for m in marks if getattr(m, "name", None)]
        if dataclasses.is_dataclass(value):
            settings |= collect_settings(value, name + ".")
        # Each key of a dict, such as `reward`, is a setting with a number as value.
        elif isinstance(value, dict):
            settings |= {f"{name}.{key}": Setting(f"{name}.{key}", float, item) for key, item in value.items()}
        else:
            name = prefix + renamed[0] if renamed else name
            settings[name] = Setting(name, hint, value, tuple(m for m in marks if isinstance(m, Bound)))
    return settings


def split_args(args: Sequence[str]) -> tuple[list[str], list[Flag]]:
    """Splits a command line into (words before the first flag, flags with the words that follow each as values).

    Only two dashes begin a flag, so that -1 is a value. Dashes in the name of a flag become underscores. Nothing is
    checked: the flags may be unknown, repeated or without a value.

    >>> split_args(["run", "--steps", "5", "--algo.clip-high=0.3"])
    (['run'], [Flag(name='steps', values=('5',)), Flag(name='algo.clip_high', values=('0.3',))])
    """
    words: list[str] = []
    flags: list[tuple[str, list[str]]] = []
    for arg in args:
        # A single dash does not begin a flag: it can be the sign of a negative value.
        if arg.startswith("--") and len(arg) > 2:
            name, equals, value = arg[2:].partition("=")
            flags.append((name.replace("-", "_"), [value] if equals else []))
        elif flags:
            flags[-1][1].append(arg)
        else:
            words.append(arg)
    return words, [Flag(name, tuple(values)) for name, values in flags]


def wants_help(args: Sequence[str]) -> bool:
    """Returns whether `-h` or `--help` is among the words of a command line, at any place."""
    return any(arg in HELP for arg in args)


def check_given(given: Sequence[GivenSetting], valid: Mapping[str, Setting]) -> None:
    """Raises a ConfigError for settings that do not exist or are given twice.

    `valid` has the settings that exist, by full name. For an old name of a setting the message tells the new one.
    """
    seen: set[str] = set()
    for item in given:
        if item.name not in valid:
            new = get_current_setting_name(item.name)
            if new in valid:
                raise ConfigError(f"{item.spelling} has a new name; write {format_flag(new)} instead.")
            raise item.make_unknown_error(valid)
        if item.name in seen:
            raise ConfigError(f"{item.spelling} is given twice; give it once.")
        seen.add(item.name)
        if isinstance(item, Flag) and not valid[item.name].takes_many:
            # Words after the value of a flag may be settings without their two dashes.
            for word in item.values[1:]:
                raise_if_misplaced(word, valid)


def raise_if_misplaced(word: str, valid: Mapping[str, Setting]) -> None:
    """Raises a ConfigError if a word of a command line looks like a setting but has not two dashes, such as steps=3."""
    if remedy := read_misplaced_setting(word, valid, format_flag):
        raise ConfigError(f'unexpected word "{word}". {remedy}')


def merge_repeated(given: Sequence[GivenSetting], valid: Mapping[str, Setting]) -> list[GivenSetting]:
    """Returns the settings with the values of repeated flags in one, if the flag takes several values.

    So several values can begin with two dashes: `--stop=--a --stop=--b`.
    """
    merged: dict[str, Flag] = {}
    others: list[GivenSetting] = []
    for item in given:
        if isinstance(item, Flag) and item.name in valid and valid[item.name].takes_many:
            earlier = merged[item.name].values if item.name in merged else ()
            merged[item.name] = Flag(item.name, earlier + item.values)
        else:
            others.append(item)
    return [*others, *merged.values()]


def format_setting(name: str, value: Any) -> list[str]:
    """Returns the words of a command line that set the setting `name` to `value`, whatever the value looks like.

    >>> format_setting("task.columns", ("a=b", "--c")), format_setting("optim.lr", 0.1)
    (['--task.columns', 'a=b', '--task.columns=--c'], ['--optim.lr=0.1'])
    """
    flag = format_flag(name)
    if not isinstance(value, tuple | list):
        return [f"{flag}={value}"]
    words = [flag]
    for item in map(str, value):
        words.append(f"{flag}={item}" if item.startswith("--") and len(item) > 2 else item)
    # A flag without a value of its own is not needed before one that has it.
    return words[1:] if len(words) > 1 and words[1].startswith(f"{flag}=") else words


def apply_settings(default: T, given: Sequence[GivenSetting]) -> T:
    """Returns a copy of the dataclass instance `default` with the values that `given` has.

    Raises a ConfigError for unknown or repeated settings and for values of the wrong type or number. Bounds are not
    checked. Errors of the dataclasses themselves pass through, such as a TaskError for a setting that a task refuses.
    """
    valid = collect_settings(default)
    given = merge_repeated(given, valid)
    check_given(given, valid)
    return replace_settings(default, {item.name: item.read_value(valid[item.name]) for item in given})
