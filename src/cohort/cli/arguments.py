"""Reading of a command's positional words and typed options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from cohort.config import flags
from cohort.config.help import print_settings_help
from cohort.config.rules import check_option_bounds
from cohort.errors import ConfigError

T = TypeVar("T")
# What every command says about its argument RUN.
ABOUT_RUN = (
    "RUN is the directory of a run, or, for runs in the folder runs, its name or a unique part of that. A run of a "
    "sweep is also SWEEP/NUMBER."
)


def read_arguments(
    command: str, places: Sequence[str], about: str, default: T, args: Sequence[str]
) -> tuple[list[str], T]:
    """Reads the words after a command. Returns its positional words and a copy of `default` with the flags applied.

    `places` name the positional words, such as ["RUN", "OUT"]: all are required, before or after the flags. "..." after
    the last name allows several words in its place. `default` is a dataclass with one field per flag. `--help` prints
    `about` and the flags, and raises SystemExit. Raises ConfigError for missing or unexpected words and for wrong
    flags.
    """
    prog = " ".join(["cohort", command, *places])
    takes_more = places[-1:] == ["..."]
    places = places[:-1] if takes_more else places
    if flags.wants_help(args):
        print_settings_help(default, prog, f"{about} {ABOUT_RUN}" if "RUN" in places else about, has_switches=True)
        raise SystemExit(0)
    words, given = flags.split_args(args)
    valid = flags.collect_settings(default)
    given, late = _split_late_words(given, valid)
    # Words behind a flag count like words before it.
    words += late
    for word in words:
        flags.raise_if_misplaced(word, valid)
    if len(words) < len(places):
        raise ConfigError(f"the argument {places[len(words)]} is missing; write: {prog} [--flags].")
    if len(words) > len(places) and not takes_more:
        raise ConfigError(f'unexpected word "{words[len(places)]}"; remove it and write: {prog} [--flags].')
    options = flags.apply_settings(default, given)
    check_option_bounds(options)
    return words, options


def _split_late_words(
    given: Sequence[flags.Flag], valid: dict[str, flags.Setting]
) -> tuple[list[flags.Flag], list[str]]:
    """Separates flags from positional words that follow them. Returns (flags with their own values, those words).

    In `given` a flag has every word after it as a value. If its setting in `valid` has a single value, the further
    words are positional; unknown flags and those of several values keep all words. A switch (type bool) needs no value:
    without "true" or "false" after it, it is on, and the words after it are positional.
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
