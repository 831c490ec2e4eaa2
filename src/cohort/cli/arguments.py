"""Reading of a command's positional words and typed options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from cohort.config import flags
from cohort.errors import ConfigError

T = TypeVar("T")


def read_arguments(
    command: str, places: Sequence[str], about: str, default: T, args: Sequence[str]
) -> tuple[list[str], T]:
    """Returns the positional words, one per name in `places`, and `default` with the flags applied.

    `places` are names in capitals, such as RUN; all words are required and may stand before or after the flags.
    `about` is the text of the help. `--help` prints it and raises SystemExit. Raises ConfigError for a mistake.
    """
    prog = " ".join(["cohort", command, *places])
    if flags.wants_help(args):
        flags.print_help(default, prog, about)
        raise SystemExit(0)
    words, given = flags.split_args(args)
    given, late = _split_late_words(given, flags.collect_settings(default))
    # Words behind a flag count like words before it.
    words += late
    if len(words) < len(places):
        raise ConfigError(f"{places[len(words)]} is missing: {prog} [--flags].")
    if len(words) > len(places):
        raise ConfigError(f'unexpected "{words[len(places)]}": {prog} [--flags].')
    return words, flags.apply_flags(default, given, prog)


def _split_late_words(
    given: Sequence[flags.Flag], valid: dict[str, flags.Setting]
) -> tuple[list[flags.Flag], list[str]]:
    """Separates flags from positional words that follow them. Returns the flags and those words.

    A flag takes every word after it. If it has a single value, the further words belong to the command. A switch
    (a flag of type bool) needs no value: without "true" or "false" after it, it is on.
    """
    kept: list[flags.Flag] = []
    late: list[str] = []
    for flag in given:
        is_single = flag.name in valid and not valid[flag.name].takes_many
        if is_single and valid[flag.name].type is bool and "".join(flag.values[:1]).lower() not in ("true", "false"):
            flag = flags.Flag(flag.name, ("True", *flag.values))
        kept.append(flags.Flag(flag.name, flag.values[:1]) if is_single else flag)
        late += flag.values[1:] if is_single else ()
    return kept, late
