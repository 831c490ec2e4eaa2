"""Command-line flags for any dataclass: tyro parses and writes the help, the errors are one line of ours.

Flag names and arity are checked here first, because only then can a message name the nearest valid flag; tyro
then converts the values, and when it refuses, the flags are tried one by one to name the guilty one.
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

from cohort.config.names import current_setting
from cohort.config.section import Bound
from cohort.errors import CohortError, ConfigError

T = TypeVar("T")

HELP = ("-h", "--help")
_TYRO = (tyro.conf.FlagConversionOff,)  # `--flag true`, not `--no-flag`: one way to write every setting


@dataclass(frozen=True, slots=True)
class Leaf:
    """One setting: its dotted name with underscores, its type, its value in the defaults, and its bounds."""

    name: str
    type: Any
    value: Any
    bounds: tuple[Bound, ...] = ()

    @property
    def many(self) -> bool:
        return get_origin(self.type) in (tuple, list)


@dataclass(frozen=True, slots=True)
class Flag:
    """`--name value ...` as written."""

    name: str
    values: tuple[str, ...]

    @property
    def shown(self) -> str:
        return show(self.name)


def show(name: str) -> str:
    """The spelling the help uses.

    >>> show("algo.clip_high")
    '--algo.clip-high'
    """
    return "--" + name.replace("_", "-")


def leaves(config: Any, prefix: str = "") -> dict[str, Leaf]:
    """Every setting of a (nested) dataclass instance, in order; a dict counts one setting a key."""
    found: dict[str, Leaf] = {}
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        hint = hints[field.name]
        hint, marks = (hint.__origin__, hint.__metadata__) if get_origin(hint) is typing.Annotated else (hint, ())
        if tyro.conf.Suppress in marks:
            continue
        renamed = [m.name for m in marks if getattr(m, "name", None)]
        if dataclasses.is_dataclass(value):
            found |= leaves(value, name + ".")
        elif isinstance(value, dict):
            found |= {f"{name}.{key}": Leaf(f"{name}.{key}", float, item) for key, item in value.items()}
        else:
            name = prefix + renamed[0] if renamed else name
            found[name] = Leaf(name, hint, value, tuple(m for m in marks if isinstance(m, Bound)))
    return found


def split(args: Sequence[str]) -> tuple[list[str], list[Flag]]:
    """Words before the first flag, then the flags with the words that follow each.

    >>> split(["run", "--steps", "5", "--algo.clip-high=0.3"])
    (['run'], [Flag(name='steps', values=('5',)), Flag(name='algo.clip_high', values=('0.3',))])
    """
    words: list[str] = []
    flags: list[tuple[str, list[str]]] = []
    for arg in args:
        if arg.startswith("--") and len(arg) > 2:
            name, equals, value = arg[2:].partition("=")
            flags.append((name.replace("-", "_"), [value] if equals else []))
        elif flags:
            flags[-1][1].append(arg)
        else:
            words.append(arg)
    return words, [Flag(name, tuple(values)) for name, values in flags]


def wants_help(args: Sequence[str]) -> bool:
    return any(arg in HELP for arg in args)


def unknown(name: str, valid: Collection[str]) -> ConfigError:
    """The error for a flag that does not exist, with the nearest that does."""
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
    group = name.partition(".")[0] + "."
    siblings = [show(v) for v in valid if "." in name and v.startswith(group)]
    if close:
        remedy = "Did you mean " + " or ".join(show(c) for c in close[:3]) + "?"
    elif siblings:
        remedy = f"Valid: {', '.join(siblings)}."
    else:
        remedy = "Add --help to see every flag."
    return ConfigError(f"unknown flag {show(name)}. {remedy}")


def describe(hint: Any) -> str:
    """A type in words, for messages.

    >>> describe(int), describe(Literal["a", "b"]), describe(tuple[str, ...])
    ('a whole number', 'one of a, b', 'text (several, separated by spaces)')
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in inner)
    if origin is tuple and inner[-1] is not ...:
        return f"{len(inner)} values ({', '.join(describe(t) for t in inner)})"
    if origin in (tuple, list):
        return f"{describe(inner[0])} (several, separated by spaces)"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(t) for t in inner)
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def check(flags: Sequence[Flag], valid: dict[str, Leaf]) -> None:
    """Refuse unknown and repeated flags, and the wrong number of values."""
    seen: set[str] = set()
    for flag in flags:
        if flag.name not in valid:
            new = current_setting(flag.name)
            raise ConfigError(f"{flag.shown} is now {show(new)}.") if new in valid else unknown(flag.name, valid)
        if flag.name in seen:
            raise ConfigError(f"{flag.shown} is given twice; give it once.")
        seen.add(flag.name)
        leaf = valid[flag.name]
        if not leaf.many and len(flag.values) != 1:
            got = f"got {len(flag.values)}: {' '.join(flag.values)}" if flag.values else "got none"
            raise ConfigError(f"{flag.shown} takes one value ({describe(leaf.type)}), {got}.")


def _words(flag: Flag, leaf: Leaf) -> list[str]:
    values = [_truth(v) for v in flag.values] if leaf.type is bool else list(flag.values)
    return [flag.shown, *values] if leaf.many else [f"{flag.shown}={values[0]}"]


def _truth(value: str) -> str:
    return {"true": "True", "false": "False"}.get(value.lower(), value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """tyro reports a value it cannot convert on stderr whatever it is told; our own line says it better."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def read(default: T, args: Sequence[Flag], prog: str) -> T:
    """`default` with the flags applied."""
    valid = leaves(default)
    check(args, valid)

    def parse(flags: Sequence[Flag]) -> T:
        words = [word for flag in flags for word in _words(flag, valid[flag.name])]
        with _quiet():
            return tyro.cli(type(default), default=default, args=words, prog=prog, config=_TYRO, console_outputs=False)

    def refuses(flags: Sequence[Flag]) -> bool:
        try:
            parse(flags)
        except SystemExit:
            return True
        except CohortError:  # the flag alone does not suit the defaults; together with the others it may
            return False
        return False

    with contextlib.suppress(SystemExit):
        return parse(args)
    for flag in args:
        if refuses([flag]):
            text = " ".join(flag.values)
            raise ConfigError(f'{flag.shown} must be {describe(valid[flag.name].type)}, not "{text}".')
    raise AssertionError(f"tyro refused {[f.shown for f in args]} together but none alone")


def print_help(default: Any, prog: str, description: str) -> None:
    """tyro's grouped help for `default`, on stdout."""
    with contextlib.suppress(SystemExit):
        tyro.cli(type(default), default=default, args=["--help"], prog=prog, description=description, config=_TYRO)
