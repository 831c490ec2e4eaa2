"""`cohort runs [FOLDER ...] [--sort NAME] [--filter CONDITION ...] [--metrics NAME,...] [--json]`: a table of runs."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from cohort.cli.arguments import read_arguments
from cohort.errors import ConfigError
from cohort.logs.curve import ASCII_BLOCKS, BLOCKS
from cohort.logs.printing import print_note, print_result
from cohort.run.finding import find_run

if TYPE_CHECKING:
    from cohort.inspect.runs.table import TableLine
    from cohort.run.summary import RunSummary

_FOLDER = "runs"
_COLOURS = {
    "running": "cyan",
    "running?": "cyan",
    "done": "green",
    "stopped": "yellow",
    "crashed": "red",
    "broken": "red",
    "empty": "dim",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which runs are shown, in which order, and how."""

    sort: str = "date"
    """What comes first: the newest (date), the best or largest (step, accuracy, best, reward, any setting or metric),
    or the first by alphabet (name, state, recipe, model)."""
    reverse: bool = False
    """Turn the order around."""
    filter: tuple[str, ...] = ()
    """Only runs that fulfil this condition, as in "state=running", "accuracy>0.5", "optim.lr=1e-4" or "name~word";
    several conditions must all hold."""
    metrics: str = ""
    """Further columns: names of metrics or settings, separated by commas, as in "entropy,optim.lr"."""
    json: bool = False
    """Print a JSON array with everything that is known of each run, for programs."""


def run(args: list[str]) -> None:
    """Runs `cohort runs` with `args`, the words after it: prints a table of the runs in folders.

    Raises CohortError for a folder that does not exist, and for wrong flags.
    """
    about = (
        "List the runs in FOLDER and in the folders in it, with their state, newest accuracy and reward (default: the "
        f"folder {_FOLDER}). FOLDER may also be a run or a sweep, or its name. It only reads: runs that are under way "
        "are not disturbed."
    )
    folders = list(takewhile(lambda arg: not arg.startswith("-"), args))
    _, options = read_arguments("runs [FOLDER ...]", [], about, Options(), args[len(folders) :])
    # Imported here because they import the recipes: help and mistakes must not wait for that.
    from cohort.inspect.runs.query import describe_splits, parse_filter, select_runs, sort_runs
    from cohort.run.summary import read_summaries

    filters = [parse_filter(text) for text in options.filter]
    is_missing = not folders and not Path(_FOLDER).is_dir()
    found = [] if is_missing else read_summaries([_find_folder(word) for word in folders or [_FOLDER]])
    chosen = sort_runs(select_runs(found, filters), _find_name(options.sort, found), options.reverse)
    metrics = _split_metrics(options.metrics, found)
    if options.json:
        _print_json(chosen)
    elif not chosen:
        _print_reason(found, folders or [_FOLDER])
    else:
        _print_table(chosen, metrics)
        for note in describe_splits(chosen, _find_name(options.sort, found)):
            print_note(note)


def _find_folder(word: str) -> Path:
    """Returns the folder that a word means: a path, or the name of a sweep or run in the folder runs, or a part of it.

    Raises ConfigError if the word is a condition without its flag, and RunError if several runs have it in their names.
    """
    from cohort.inspect.runs.query import is_filter

    path = Path(word).expanduser()
    if path.exists() or (path := Path(_FOLDER) / word).is_dir():
        return path
    if is_filter(word):
        raise ConfigError(f'there is no folder {word}. If it is a condition, write --filter "{word}".')
    return find_run(word)


def _find_name(name: str, runs: Sequence[RunSummary]) -> str:
    """Returns the name of a setting as runs record it, if the user wrote it as a flag, such as --optim.clip-norm."""
    if any(name in run.settings or name in run.metrics for run in runs):
        return name
    return name.removeprefix("--").replace("-", "_")


def _split_metrics(text: str, runs: Sequence[RunSummary]) -> list[str]:
    """Returns the names in a text like "entropy,optim.lr". Raises ConfigError for one that no run has."""
    from cohort.inspect.runs.query import check_name

    names = [_find_name(name.strip(), runs) for name in text.split(",") if name.strip()]
    for name in names:
        check_name("--metrics", name, runs)
        if names.count(name) > 1:
            raise ConfigError(f"--metrics names {name} twice; name it once.")
    return names


def _print_json(runs: Sequence[RunSummary]) -> None:
    """Prints a JSON array, one run per line."""
    from cohort.inspect.runs.record import make_record

    lines = [json.dumps(make_record(run), allow_nan=False) for run in runs]
    if not lines:
        print_result("[]")
        return
    # Each line is printed by itself: escaping a text of many lines looks at every character.
    for i, line in enumerate(lines):
        print_result(("[" if i == 0 else " ") + line + ("]" if i == len(lines) - 1 else ","))


def _print_reason(found: Sequence[RunSummary], folders: Sequence[str]) -> None:
    """Prints why there is no table: the folders have no runs, or no run fulfils the conditions."""
    if found:
        print_note(f"none of the {len(found)} runs fulfils all conditions of --filter")
    else:
        print_note(f"there are no runs in {', '.join(folders)}. Start one: cohort train quickstart")


def _print_table(runs: Sequence[RunSummary], metrics: Sequence[str]) -> None:
    """Prints the table and, on a terminal, the number of runs in each state."""
    from cohort.inspect.runs.table import TableFormat, format_runs

    is_terminal = sys.stdout.isatty()
    has_blocks = _can_print(BLOCKS + "…")
    shape = TableFormat(
        width=shutil.get_terminal_size().columns if is_terminal else None,
        blocks=BLOCKS if has_blocks else ASCII_BLOCKS,
        mark="…" if has_blocks else "~",
    )
    table = format_runs(runs, metrics, shape)
    if is_terminal:
        _print_in_colour(table.lines)
        for note in table.notes:
            print_note(note)
        counts = Counter(run.state for run in runs)
        states = ", ".join(f"{number} {state}" for state, number in counts.most_common())
        print_note(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}: {states}")
        return
    for line in table.lines:
        print_result(line.text)


def _print_in_colour(lines: Sequence[TableLine]) -> None:
    """Prints the lines of the table to a terminal, with the state of each run in its colour."""
    # Imported here because a pipe needs no colours.
    from rich.text import Text

    from cohort.logs.console import make_console

    text = Text("\n".join(line.text for line in lines))
    place = 0
    for i, line in enumerate(lines):
        begin, end = place + line.start, place + line.start + len(line.state)
        text.stylize(_COLOURS.get(line.state, ""), begin, end)
        text.stylize("bold" if i == 0 else "", place, place + len(line.text))
        place += len(line.text) + 1
    # The lines fit; what is not in the table is left to the terminal to wrap.
    make_console().print(text, soft_wrap=True)


def _can_print(text: str) -> bool:
    """Returns whether the encoding of standard output has all characters of a text."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
