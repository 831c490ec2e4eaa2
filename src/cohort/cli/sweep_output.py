"""What `cohort sweep` prints: its beginning, the table at its end, and the list of a dry run."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from cohort.cli.output import format_table
from cohort.errors import RunError
from cohort.logs.escape import escape_line, join_command
from cohort.logs.numbers import format_duration
from cohort.logs.printing import print_note, print_result
from cohort.run.finding import find_run
from cohort.run.machine import program_name
from cohort.sweep.directory import SweepDirectory, find_sweep
from cohort.sweep.plan import Plan
from cohort.sweep.prepare import CheckedPlan
from cohort.sweep.values import format_value

if TYPE_CHECKING:
    from cohort.sweep.records import SweepTable

_WIDEST = 100  # columns of text that is wrapped
_NARROWEST = 40


def wrap_lines(text: str, indent: str = "", columns: int = 0) -> str:
    """Returns text with each of its lines broken at spaces, so that it fits into so many columns; 0 = the terminal's.

    Further lines of a broken one begin with `indent`.
    """
    columns = max(_NARROWEST, min(columns or _find_columns(), _WIDEST))
    # A flag or name that is broken cannot be copied.
    lines = [
        textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)
        for line in text.split("\n")
    ]
    return "\n".join(lines)


def _find_columns() -> int:
    """Returns the width of the terminal; that of text if there is none."""
    return shutil.get_terminal_size((_WIDEST, 24)).columns


def describe_sweep(directory: SweepDirectory, num_left: int, jobs: int) -> str:
    """Returns the lines that a sweep begins with: its folder, its size and what it chooses on."""
    plan = directory.plan
    done = plan.num_runs - num_left
    lines = [f"sweep {directory.shown_path}: {describe_size(plan)}" + (f", {done} of them done" if done else "")]
    if jobs > 1:
        threads = f", with {plan.threads} thread{'s' * (plan.threads != 1)} each" if plan.threads else ""
        lines.append(f"{jobs} runs at once{threads}")
    if note := describe_choice(plan):
        lines.append(note)
    return "\n".join(lines)


def describe_size(plan: Plan) -> str:
    """Returns the numbers of combinations, seeds and runs in words."""
    num, seeds = len(plan.combinations), len(plan.seeds)
    return f"{num} combination{'s' * (num != 1)} x {seeds} seed{'s' * (seeds != 1)} = {plan.num_runs} runs"


def describe_choice(plan: Plan) -> str:
    """Returns which problems the runs are evaluated on, if that is not what the recipe says or is a danger."""
    if plan.split:
        return "the runs are evaluated on the validation split: the test split is for the winner alone"
    if plan.split_note:
        return f"the runs are evaluated on the test split ({plan.split_note}): the winner's accuracy will be too good"
    return ""


def print_table(directory: SweepDirectory, table: SweepTable, *, as_json: bool) -> None:
    """Prints the table, what it means, the runs that failed, and what to do with the best combination."""
    from cohort.sweep.notes import describe_best
    from cohort.sweep.render import describe_constants, render_json

    if as_json:
        print_result(render_json(table), end="")
        return
    print_result(f"\n{format_combinations(table, _find_columns())}")
    if shared := describe_constants(table):
        print_result(wrap_lines(shared))
    print_result("")
    for note in table.notes:
        print_result(wrap_lines(f"- {note}", "  "))
    print_result("")
    for row in (row for row in table.runs if row.state == "failed"):
        print_result(f"failed: {row.name}: {row.why}")
        print_result(f"  its log: {directory.shown_path / 'logs' / row.name}.log")
    for row in (row for row in table.runs if row.state == "missing" and row.why):
        print_result(wrap_lines(f"missing: {row.name}: {row.why}"))
    name = find_short_name(directory)
    if any(row.state == "failed" for row in table.runs):
        print_result(f"try the failed runs again with: {join_command([program_name(), 'resume', name])}")
    for sentence in describe_best(table):
        print_result(wrap_lines(escape_line(sentence, 2000)))
    # Before all runs have ended another combination may still win.
    if all(row.state != "missing" for row in table.runs):
        _print_measurement(directory, table)
        print_result(f"the table is in {directory.shown_path / 'sweep.md'} and sweep.json")
        print_result(f"see it again with: {join_command([program_name(), 'sweep', name])}")


def format_combinations(table: SweepTable, columns: int) -> str:
    """Returns the table of combinations as text of at most `columns` columns.

    Where it is too wide, the names of settings lose their first words, numbers a digit, and at last the combinations
    are numbered and listed below.
    """
    from cohort.sweep.render import make_numbered_cells, make_short_cells, shorten_header

    for digits in (3, 2):
        cells = make_short_cells(table, digits)
        for header in (cells.header, shorten_header(cells.header)):
            text = format_table(header, cells.rows)
            if max(map(len, text.splitlines())) <= columns:
                return text
    cells = make_numbered_cells(table, 3 if columns >= _WIDEST else 2)
    names = [" ".join(f"{name}={value}" for name, value in row.settings.items()) for row in table.combinations]
    seeds = [f" ({row.num_seeds} seed{'s' * (row.num_seeds != 1)})" for row in table.combinations]
    differ = len(set(seeds)) > 1
    lines = [
        wrap_lines(escape_line(f"{number:>3}  {name}{few if differ else ''}", 1000), "     ", columns)
        for number, (name, few) in enumerate(zip(names, seeds, strict=True), 1)
    ]
    return "\n".join([format_table(cells.header, cells.rows), *lines])


def find_short_name(directory: SweepDirectory) -> str:
    """Returns the shortest text by which commands find a sweep: its name, or its path if that is not enough."""
    found = find_sweep(directory.path.name)
    return directory.path.name if found and found.resolve() == directory.path else str(directory.shown_path)


def _print_measurement(directory: SweepDirectory, table: SweepTable) -> None:
    """Prints the command that evaluates the best combination on the test split: the run of its first seed.

    Of several seeds it is chosen without a look at its result, so its accuracy there is not flattered.
    """
    from cohort.sweep.render import format_eval_command

    runs = table.best_runs
    if not runs:
        return
    first, *others = runs
    more = f" The other seed{'s' * (len(others) > 1)}: sweep.md." if others else ""
    which = f" (seed {first.seed}, the first: chosen without a look at its result)" if others else ""
    print_result(wrap_lines(f"Measure it once on the test split{which}.{more}"))
    command = format_eval_command(table, first, _find_run_name(directory, first.name), program_name())
    print_result(f"  {command}")


def _find_run_name(directory: SweepDirectory, name: str) -> str:
    """Returns the shortest text by which commands find a run of a sweep, such as first/003."""
    number = name.partition("-")[0]
    for word in (f"{directory.path.name}/{number}", str(directory.shown_path / number)):
        try:
            if find_run(word).resolve() == directory.path / name:
                return word
        # Several runs fit.
        except RunError:
            continue
    return str(directory.shown_path / name)


def print_dry_run(checked: CheckedPlan, out: Path, jobs: int) -> None:
    """Prints all runs of a plan with their settings, and the time that they will take."""
    from cohort.sweep.predict import add_up, predict_times

    plan = checked.plan
    runs = plan.list_runs()
    times = predict_times(plan, checked.configs, out, print_note)
    sources = list(dict.fromkeys(source for _, source in times))
    # With one source there is nothing to tell apart.
    marks = {source: f" ({number})" if len(sources) > 1 else "" for number, source in enumerate(sources, 1)}
    rows = [
        [
            f"{run.number:03d}",
            *(format_value(value) for value in run.values.values()),
            str(run.seed),
            str(checked.configs[run.combination].steps),
            format_duration(times[run.combination][0]) + marks[times[run.combination][1]],
        ]
        for run in runs
    ]
    print_result(format_table(["run", *plan.axes, "seed", "steps", "time"], rows))
    total = add_up([times[run.combination][0] for run in runs], jobs)
    at_once = f", {jobs} at once" if jobs > 1 else ""
    print_result(f"{describe_size(plan)}{at_once}: about {format_duration(total)}")
    for source in sources:
        which = f"times with{marks[source]}" if marks[source] else "the times"
        print_result(wrap_lines(f"{which} are predicted from {source}"))
    if note := describe_choice(plan):
        print_result(wrap_lines(note))
