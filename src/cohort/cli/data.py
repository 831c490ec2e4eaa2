"""`cohort data TASK --out FILE [--split train] [--n N] [--task.x v]`: writes a task's prompts as JSONL.

`cohort data --from EVALUATION --keep correct --out FILE` writes the answers of an evaluation as conversations for SFT.
"""

from __future__ import annotations

import codecs
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cohort.cli.arguments import read_arguments
from cohort.cli.tasks import read_task
from cohort.config.section import AtLeast0
from cohort.errors import ConfigError
from cohort.logs.printing import print_result
from cohort.system.disk import is_standard_output, open_replacement
from cohort.tasks.base import load_rows
from cohort.tasks.conversation import make_opening


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which rows to write, and where."""

    out: str = ""
    """The file to write; - = standard output."""
    split: str = "train"
    """train, test, or another split the task has."""
    n: int = 0
    """How many rows; 0 = all of them."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Which answers of an evaluation to write, and where."""

    out: str = ""
    """The file to write; - = standard output."""
    keep: Literal["correct", "wrong", "all"] = "correct"
    """Which answers: those that the grader found right, those that it found wrong, or all that it could score."""
    least: str = ""
    """Only answers with at least this reward, for evaluations of a task without an accuracy; empty = see --keep."""
    per_problem: AtLeast0 = 0
    """How many answers of a problem at most; 0 = all that are kept. Equal answers of a problem count once."""


def run(args: list[str]) -> None:
    """Runs `cohort data` with `args`, the words after it: writes prompts, or answers, to a file or to standard output.

    A file appears complete or not at all, and replaces an older one; a device or pipe is written to. Raises ConfigError
    for wrong flags, RunError if the file cannot be written.
    """
    source, rest = _split_source(args)
    if source is None:
        _write_prompts(args)
    else:
        _write_answers(source, rest)


def _split_source(args: list[str]) -> tuple[str | None, list[str]]:
    """Returns the value of the flag --from, None if it is not given, and the other words."""
    for place, word in enumerate(args):
        if word.startswith("--from="):
            return word.partition("=")[2], [*args[:place], *args[place + 1 :]]
        if word == "--from":
            if place + 1 == len(args) or args[place + 1].startswith("--"):
                raise ConfigError("--from needs the file of an evaluation, or a run; write: --from evals/x.json.")
            return args[place + 1], [*args[:place], *args[place + 2 :]]
    return None, args


def _write_prompts(args: list[str]) -> None:
    """Writes the prompts of a task. `args` are the words after `cohort data`."""
    about = (
        "Write a task's prompts as JSONL. With --from EVALUATION in place of TASK: write the answers of an evaluation "
        "(a file of cohort eval, or a run) as conversations that cohort train sft imitates, with --keep correct, wrong "
        "or all, and --per-problem N."
    )
    task, options = read_task("data", about, Options(), args)
    if options.n < 0:
        raise ConfigError(f"--n is {options.n}; it must be at least 0 (0 = all rows). Correct or remove it.")
    choices: list[tuple[str, str]] = getattr(task, "list_choices", list)() if not options.out else []
    if choices:
        width = max(len(name) for name, _ in choices)
        print_result("\n".join(f"{name:{width}}  {about}" for name, about in choices))
        return
    # Mistakes in --out are found before the rows are loaded.
    _check_out(options.out)
    rows = load_rows(task, options.split, limit=options.n)
    if options.n > len(rows):
        raise ConfigError(
            f"--n is {options.n}, but {task.name} has {len(rows)} {options.split} rows; lower --n, or remove it "
            "for all rows."
        )
    openings = ((row, make_opening(task, row)) for row in rows)
    values = (
        {
            "id": row["id"],
            "messages": opening.messages,
            **({"tools": opening.tools} if opening.tools else {}),
            "row": row,
        }
        for row, opening in openings
    )
    _write_values(values, options.out, lambda count: f"wrote {count} {task.name} prompts ({options.split})")


def _write_answers(source: str, args: list[str]) -> None:
    """Writes the answers of the evaluation `source` as conversations. `args` are the other words."""
    about = "Write the answers of an evaluation as conversations, as JSONL, for cohort train sft."
    _, options = read_arguments("data --from EVALUATION", [], about, AnswerOptions(), args)
    _check_out(options.out)
    # Imported here because it imports numpy: help and mistakes must not wait for that.
    from cohort.evaluation.compare import find_evaluation
    from cohort.evaluation.rejection import select_answers

    evaluation = find_evaluation(Path(source))
    least = _read_least(source, options, evaluation.accuracy is not None)
    chosen = select_answers(evaluation, options.keep if least is None else least, options.per_problem)
    if not chosen.rows:
        raise ConfigError(
            f"{source} has no such answers: {chosen.describe()}. Choose others with --keep, or another evaluation."
        )
    _write_values(iter(chosen.rows), options.out, lambda count: f"wrote {count} conversations ({chosen.describe()})")


def _read_least(source: str, options: AnswerOptions, has_accuracy: bool) -> float | None:
    """Returns the least reward of answers to write; None = --keep says which. Raises ConfigError if neither can."""
    if options.least and has_accuracy:
        raise ConfigError(f"{source} has right and wrong answers: remove --least, and choose with --keep.")
    if not options.least:
        if not has_accuracy and options.keep != "all":
            raise ConfigError(
                f"{source} has rewards, and no answer is right or wrong: --keep {options.keep} cannot choose. Give "
                "--least REWARD, or --keep all."
            )
        return None
    try:
        least = float(options.least)
    except ValueError:
        least = math.nan
    if not math.isfinite(least):
        raise ConfigError(f'--least must be a number, not "{options.least}". Write for example --least 0.5.')
    return least


def _check_out(out: str) -> None:
    """Raises ConfigError if --out is missing or cannot be a file."""
    path = Path(out)
    if not out:
        raise ConfigError("--out is missing. Add --out FILE with the file to write, or --out - for standard output.")
    if out != "-" and not path.parent.is_dir():
        raise ConfigError(
            f'there is no folder "{path.parent}" for the file in --out; make the folder, or name another file.'
        )
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; name a file to write, for example {path}/rows.jsonl.")


def _write_values(values: Iterator[dict[str, Any]], out: str, describe: Callable[[int], str]) -> None:
    """Writes one JSON object per line to the file `out`, or to standard output if it is "-".

    Then prints what `describe` says about the number of lines.
    """
    if out == "-":
        is_utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
        _write_lines(_render_values(values, ascii_only=not is_utf8), sys.stdout.write)
        return
    path = Path(out)
    with open_replacement(path) as output:
        count = _write_lines(_render_values(values), lambda line: output.write(line.encode()))
    # Standard output has the rows, and nothing else.
    if not is_standard_output(path):
        print_result(f"{describe(count)} to {path}")


def _render_values(values: Iterator[dict[str, Any]], ascii_only: bool = False) -> Iterator[str]:
    """Yields each value as a line of JSON.

    With `ascii_only`, other characters are written as JSON's escapes. So are those of a line with a character that acts
    on a terminal or that no encoding has.
    """
    for value in values:
        line = json.dumps(value, ensure_ascii=ascii_only)
        yield line if line.isprintable() else json.dumps(value)


def _write_lines(lines: Iterator[str], write: Callable[[str], object]) -> int:
    """Calls `write` with each line and a line break after it, and returns how many lines there were."""
    count = 0
    for line in lines:
        write(line + "\n")
        count += 1
    return count
