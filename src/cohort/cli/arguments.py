"""Positional words and typed options of a command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from cohort.config import flags
from cohort.errors import ConfigError

T = TypeVar("T")


def read(command: str, places: Sequence[str], about: str, default: T, args: Sequence[str]) -> tuple[list[str], T]:
    """The words for `places` (names in capitals, all needed) and `default` with the flags applied.

    Words may stand before or after the flags. `--help` prints the help and ends the program.
    """
    prog = " ".join(["cohort", command, *places])
    if flags.wants_help(args):
        flags.print_help(default, prog, about)
        raise SystemExit(0)
    words, given = flags.split(args)
    given, late = _late_words(given, flags.leaves(default))
    words += late
    if len(words) < len(places):
        raise ConfigError(f"{places[len(words)]} is missing: {prog} [--flags].")
    if len(words) > len(places):
        raise ConfigError(f'unexpected "{words[len(places)]}": {prog} [--flags].')
    return words, flags.read(default, given, prog)


def _late_words(given: Sequence[flags.Flag], valid: dict[str, flags.Leaf]) -> tuple[list[flags.Flag], list[str]]:
    """Words that follow the single value of a flag belong to the command, not to the flag. A switch needs no value."""
    kept: list[flags.Flag] = []
    late: list[str] = []
    for flag in given:
        single = flag.name in valid and not valid[flag.name].many
        if single and valid[flag.name].type is bool and "".join(flag.values[:1]).lower() not in ("true", "false"):
            flag = flags.Flag(flag.name, ("True", *flag.values))
        kept.append(flags.Flag(flag.name, flag.values[:1]) if single else flag)
        late += flag.values[1:] if single else ()
    return kept, late
