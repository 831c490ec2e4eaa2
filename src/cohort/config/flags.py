"""Command-line flags for any dataclass, with tyro for conversion and help, and with error messages of one line.

Names and numbers of values are checked here before tyro sees the flags, so that a message can name the most similar
valid flag. Then tyro converts the values. If it refuses, the flags are tried one by one to find the wrong one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import tyro

from cohort.config.names import get_current_setting_name
from cohort.config.section import Bound
from cohort.errors import CohortError, ConfigError

T = TypeVar("T")

HELP = ("-h", "--help")
# Booleans are written `--flag true`, not `--no-flag`, so that every setting is written in the same way.
_TYRO = (tyro.conf.FlagConversionOff,)


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
        return get_origin(self.type) in (tuple, list)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag and its values from a command line. `name` is the full name of its setting, such as `algo.clip_high`."""

    name: str
    values: tuple[str, ...]

    @property
    def spelling(self) -> str:
        """The flag as it is written on a command line, such as `--algo.clip-high`."""
        return format_flag(self.name)


def format_flag(name: str) -> str:
    """Returns the flag for the setting with the full name `name`: `--` and the name with dashes for underscores.

    >>> format_flag("algo.clip_high")
    '--algo.clip-high'
    """
    return "--" + name.replace("_", "-")


def collect_settings(config: Any, prefix: str = "") -> dict[str, Setting]:
    """Returns every setting of a dataclass instance and of the dataclasses in it, by full name, in the order of fields.

    A full name is `prefix` and the path to the setting, such as `algo.kl.weight`. A field whose flag has another name
    stands under that name. Each key of a dict counts as a setting of type float. Fields hidden from the command line
    are left out.
    """
    settings: dict[str, Setting] = {}
    hints = typing.get_type_hints(type(config), include_extras=True)
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


def make_unknown_flag_error(name: str, valid: Collection[str]) -> ConfigError:
    """Returns the error for a flag that does not exist; the caller raises it. It suggests flags among `valid`.

    `name` and `valid` are full names of settings. First choice: names with the same last word (`optim.lr` for `--lr`).
    Then the most similar full name, then names with a similar last word; at most three are suggested. If none is
    similar, the message lists all flags that begin with the same section, or else points to `--help`.
    """
    last = name.rpartition(".")[2]
    same_last = [v for v in valid if v.rpartition(".")[2] == last]
    close = (
        same_last
        or difflib.get_close_matches(name, valid, n=1)
        or [
            v
            for v in valid
            for word in difflib.get_close_matches(last, [v.rpartition(".")[2]], n=1, cutoff=0.75)
            if word
        ]
    )
    # Without a similar name: all flags of the same section, if the flag names one.
    group = name.partition(".")[0] + "."
    siblings = [format_flag(v) for v in valid if "." in name and v.startswith(group)]
    if close:
        remedy = "Did you mean " + " or ".join(format_flag(c) for c in close[:3]) + "?"
    elif siblings:
        remedy = f"Valid: {', '.join(siblings)}."
    else:
        remedy = "Add --help to see every flag."
    return ConfigError(f"unknown flag {format_flag(name)}. {remedy}")


def describe_type(hint: Any) -> str:
    """Returns a type in words, for messages. A type that is none of the usual ones is given by its Python name.

    >>> describe_type(int), describe_type(Literal["a", "b"]), describe_type(tuple[str, ...])
    ('a whole number', 'one of a, b', 'text (several, separated by spaces)')
    """
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in inner)
    if origin is tuple and inner[-1] is not ...:
        return f"{len(inner)} values ({', '.join(describe_type(t) for t in inner)})"
    if origin in (tuple, list):
        return f"{describe_type(inner[0])} (several, separated by spaces)"
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(t) for t in inner)
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def check_flags(flags: Sequence[Flag], valid: dict[str, Setting]) -> None:
    """Raises a ConfigError for unknown flags, repeated flags, and flags of one value with none or several.

    `valid` has the settings that exist, by full name. For an old name of a setting the message tells the new one. Types
    of values are not checked, nor how many values a flag of tuples or lists has.
    """
    seen: set[str] = set()
    for flag in flags:
        if flag.name not in valid:
            new = get_current_setting_name(flag.name)
            if new in valid:
                raise ConfigError(f"{flag.spelling} has a new name; write {format_flag(new)} instead.")
            raise make_unknown_flag_error(flag.name, valid)
        if flag.name in seen:
            raise ConfigError(f"{flag.spelling} is given twice; give it once.")
        seen.add(flag.name)
        setting = valid[flag.name]
        if not setting.takes_many and len(flag.values) != 1:
            got = f"got {len(flag.values)}: {' '.join(flag.values)}" if flag.values else "got none"
            raise ConfigError(
                f"{flag.spelling} takes one value ({describe_type(setting.type)}), {got}. Write {flag.spelling} VALUE, "
                "with quotes around a text with spaces."
            )


def _make_tyro_args(flag: Flag, setting: Setting) -> list[str]:
    """Returns a flag of a setting as the command-line arguments that tyro expects, such as ["--steps=5"].

    A setting with several values gives one argument per value, after the flag. For truth values, "true" and "false" in
    any case are accepted. A setting with one value must have it: `check_flags` comes first.
    """
    values = [_capitalise_truth_value(v) for v in flag.values] if setting.type is bool else list(flag.values)
    # With `=`, a single value may begin with dashes.
    return [flag.spelling, *values] if setting.takes_many else [f"{flag.spelling}={values[0]}"]


def _capitalise_truth_value(value: str) -> str:
    """Returns tyro's "True" or "False" for "true" and "false" in any case, and any other text unchanged."""
    return {"true": "True", "false": "False"}.get(value.lower(), value)


@contextlib.contextmanager
def _silence_stderr() -> Iterator[None]:
    """Drops what is written to stderr inside the block.

    tyro reports wrong values there even with `console_outputs=False`, and the message of this module is better.
    """
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def apply_flags(default: T, flags: Sequence[Flag], prog: str) -> T:
    """Returns a copy of the dataclass instance `default` with the values that `flags` give.

    `prog` is the command in tyro's usage text, such as "cohort train quickstart". Raises a ConfigError for unknown or
    repeated flags and for values of the wrong type or number. Bounds are not checked. Errors of the dataclasses
    themselves pass through, such as a TaskError for a setting that a task refuses.
    """
    valid = collect_settings(default)
    check_flags(flags, valid)

    def parse(flags: Sequence[Flag]) -> T:
        """Returns `default` with `flags` applied by tyro, which raises SystemExit for wrong values."""
        words = [word for flag in flags for word in _make_tyro_args(flag, valid[flag.name])]
        with _silence_stderr():
            return tyro.cli(type(default), default=default, args=words, prog=prog, config=_TYRO, console_outputs=False)

    def is_refused(flag: Flag) -> bool:
        """Returns whether tyro cannot convert the values of `flag`."""
        try:
            parse([flag])
        except SystemExit:
            return True
        except CohortError:
            # Alone, the flag may contradict the defaults. Together with the other flags it may be right.
            return False
        return False

    # All flags together first, because a flag may be right only with the others.
    with contextlib.suppress(SystemExit):
        return parse(flags)
    for flag in flags:
        if is_refused(flag):
            text = " ".join(flag.values)
            raise ConfigError(
                f'{flag.spelling} must be {describe_type(valid[flag.name].type)}, not "{text}". Correct the value.'
            )
    raise AssertionError(f"tyro refused {[f.spelling for f in flags]} together but none alone")


def print_help(default: Any, prog: str, description: str) -> None:
    """Prints tyro's help for all settings of the dataclass instance `default`, grouped by section, and returns.

    `prog` is the command in the usage line, `description` the text below it.
    """
    with contextlib.suppress(SystemExit):
        tyro.cli(type(default), default=default, args=["--help"], prog=prog, description=description, config=_TYRO)
