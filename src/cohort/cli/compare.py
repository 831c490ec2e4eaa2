"""`cohort compare A B [--show N] [--json]`: two evaluations of the same problems, problem by problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cohort.cli.arguments import read_arguments
from cohort.cli.output import format_table
from cohort.errors import ConfigError
from cohort.logs.escape import escape_line
from cohort.logs.printing import print_result

if TYPE_CHECKING:
    from cohort.evaluation.compare import Comparison, DifferingProblem
    from cohort.evaluation.records import Evaluation


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to show."""

    show: int = 5
    """How many of the won and of the lost problems are listed; 0 = none, -1 = all."""
    json: bool = False
    """Print one JSON object instead, for programs."""


def run(args: list[str]) -> None:
    """Runs `cohort compare` with `args`, the words after it: prints the comparison of two evaluations.

    Raises CohortError if they cannot be read or compared.
    """
    about = (
        "Tell whether B is better than A: print the paired difference with its 95% interval and p-value, and the "
        "problems that B won and lost. A and B are files written by `cohort eval` or run directories, whose last "
        "evaluation is used (RUN@STEP: the one of that step; RUN@best: the best one). Both must have the same "
        "problems and grader."
    )
    (first, second), options = read_arguments("compare", ["A", "B"], about, Options(), args)
    if options.show < -1:
        raise ConfigError(
            f"--show is {options.show}; it must be at least -1 (-1 = all problems, 0 = none). Correct or remove it."
        )
    from cohort.evaluation.compare import compare, find_evaluation

    # Runs are called as the user calls them; a file has a longer name, and does not say which model it is about.
    names = ("A" if Path(first).is_file() else first, "B" if Path(second).is_file() else second)
    comparison = compare(find_evaluation(Path(first)), find_evaluation(Path(second)), names)
    print_result(comparison.to_json() if options.json else format_comparison(comparison, options.show))


def format_comparison(comparison: Comparison, show: int) -> str:
    """Returns a comparison as text: a table of A and B, the difference with its interval, and some of the problems.

    Lists up to `show` of the problems that B won and of those that B lost; 0 = none, -1 = all.
    """
    a = comparison.first
    b = comparison.second
    d = comparison.difference
    rows = []
    for letter, name, e in zip("AB", comparison.names, (a, b), strict=True):
        rows.append(
            [
                letter,
                _describe_model(e, "" if name == letter else name),
                f"{e.value:.3f}",
                e.format_interval(),
            ]
        )
    verdict = {1: "B is better", -1: "A is better", 0: "no significant difference"}[d.verdict]
    lines = [
        format_table([a.setting.task, "model", a.measure, "95% interval"], rows),
        "",
        f"B - A: {d.mean:+.3f}, 95% interval {d.low:+.3f} to {d.high:+.3f}, p = {d.p:.2g} ({d.test}): {verdict}",
        f"of {comparison.num_problems} problems B wins {d.wins}, loses {d.losses}, and is equal on "
        f"{comparison.num_problems - d.wins - d.losses}",
        *(f"note: {escape_line(note, 1000)}" for note in comparison.notes),
    ]
    if show:
        lines += _list_problems("won by B", comparison.won, show) + _list_problems("lost by B", comparison.lost, show)
    return "\n".join(lines)


def _describe_model(evaluation: Evaluation, name: str) -> str:
    """Returns which model an evaluation is of: its name and its step. `name` is that of its run, "" = not known."""
    run, _, which = name.rpartition("@") if "@" in name else (name, "", "")
    step = str(evaluation.step)
    if not name:
        is_named = not evaluation.step or evaluation.setting.model.endswith(f"@{step}")
        return evaluation.setting.model + ("" if is_named else f" step {step}")
    return f"{run} step {step}" if which in ("", step) else f"{name} (step {step})"


def _list_problems(title: str, pairs: Sequence[DifferingProblem], show: int) -> list[str]:
    """Returns the lines of a list: an empty line, the title, and one line per problem, at most `show` (-1 = all).

    Empty if there is no problem.
    """
    if not pairs:
        return []
    shown = pairs if show < 0 else pairs[:show]
    rest = f", the first {len(shown)}" if len(shown) < len(pairs) else ""
    lines = ["", f"{title} ({len(pairs)}{rest}):"]
    for pair in shown:
        lines.append(
            f"  {pair.first:.2f} -> {pair.second:.2f}  {escape_line(pair.id, 90)}: {escape_line(pair.question, 90)}"
        )
    return lines
