"""The table of a sweep as cells, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from cohort.logs.escape import escape_line, join_command
from cohort.logs.numbers import format_compact
from cohort.sweep.notes import describe_best
from cohort.sweep.records import CombinationRow, PairedDifference, RunRow, SweepTable

TRAINING_REWARD = "training reward"
_MAX_CELL = 300  # characters
_MAX_COMMAND = 2000
_MEASURE_NOTE = (
    "One command per seed. Run the first one once; run the others only to learn how much seeds differ.\n"
    "If the sweep is not in the folder `runs`, write its path in place of its name."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CellTable:
    """A table as texts."""

    header: list[str]
    rows: list[list[str]]


def render_json(table: SweepTable) -> str:
    """Returns the table as JSON text with a newline at its end."""
    return json.dumps(asdict(table), indent=1, allow_nan=False) + "\n"


def make_combination_cells(table: SweepTable, digits: int = 3) -> CellTable:
    """Returns one row per combination: its values, number of seeds, accuracy or reward, and difference to the best.

    `digits` are those after the point.
    """
    measure = _find_measure(table)
    numbers = [measure, "95% interval"] if table.measure else [measure] if measure else []
    numbers += ["to best", "95% interval", "p"] if table.best is not None else []
    return CellTable(
        header=[*table.axes, "seeds", *numbers],
        rows=[_make_combination_cells(row, table, measure, digits) for row in table.combinations],
    )


def _find_measure(table: SweepTable) -> str:
    """Returns what the runs are measured by: "accuracy" or "reward"; "" without a result.

    If none is evaluated, it is the "training reward" or, where samples have no rewards, the "loss" of training.
    """
    if table.measure:
        return table.measure
    if any(row.training_reward is not None for row in table.runs):
        return TRAINING_REWARD
    return "loss" if any(row.state in ("done", "stopped") for row in table.runs) else ""


def make_short_cells(table: SweepTable, digits: int = 3) -> CellTable:
    """Returns the cells of the combinations without the columns that `describe_constants` tells in words."""
    cells = make_combination_cells(table, digits)
    dropped = _find_constants(table)
    kept = [place for place in range(len(cells.header)) if place not in dropped]
    return CellTable(
        header=[cells.header[place] for place in kept], rows=[[row[place] for place in kept] for row in cells.rows]
    )


def make_numbered_cells(table: SweepTable, digits: int) -> CellTable:
    """Returns the cells of the combinations with a number, counted from 1, in place of their values and seeds."""
    cells = make_combination_cells(table, digits)
    first = len(table.axes) + 1
    rows = [[str(number), *row[first:]] for number, row in enumerate(cells.rows, 1)]
    return CellTable(header=["no.", *cells.header[first:]], rows=rows)


def describe_constants(table: SweepTable) -> str:
    """Returns what all combinations share, and is therefore no column: settings, seeds and problems; "" = nothing."""
    cells = make_combination_cells(table)
    parts: list[str] = []
    for place in _find_constants(table):
        name, value = cells.header[place], cells.rows[0][place]
        is_seeds = place == len(table.axes)
        parts.append(f"{value} seed{'s' * (value != '1')}" if is_seeds else f"{name}={value}")
    problems = {row.num_problems for row in table.combinations}
    if len(problems) == 1 and max(problems):
        parts.append(f"{max(problems)} problem{'s' * (max(problems) != 1)}")
    where = "In all rows: " if len(table.combinations) > 1 else ""
    return f"{where}{', '.join(parts)}." if parts else ""


def _find_constants(table: SweepTable) -> list[int]:
    """Returns the places of the columns of settings and seeds that have the same cell in all rows."""
    rows = make_combination_cells(table).rows
    first = 0 if len(rows) > 1 else len(table.axes)
    return [place for place in range(first, len(table.axes) + 1) if len({row[place] for row in rows}) == 1]


def shorten_header(header: Sequence[str]) -> list[str]:
    """Returns a header with the last words of names such as `optim.lr`, where they differ from all other words.

    >>> shorten_header(["optim.lr", "algo.kl.weight", "reward.weight", "seeds"])
    ['lr', 'algo.kl.weight', 'reward.weight', 'seeds']
    """
    last = [name.rpartition(".")[2] for name in header]
    return [short if last.count(short) == 1 else name for name, short in zip(header, last, strict=True)]


def _make_combination_cells(row: CombinationRow, table: SweepTable, measure: str, digits: int) -> list[str]:
    """Returns the cells of a combination."""
    seeds = str(row.num_seeds) if row.num_seeds == len(table.seeds) else f"{row.num_seeds} of {len(table.seeds)}"
    cells = [*row.settings.values(), seeds]
    if not table.measure:
        return [*cells, *([_format_training(row, measure)] if measure else [])]
    mark = "*" if row.num_stopped else ""
    value = "-" if row.value is None else f"{row.value:.{digits}f}{mark}"
    cells += [value, _format_interval(row.low, row.high, digits)]
    if table.best is None:
        return cells
    return [*cells, *(["best", "", ""] if row.is_best else _make_difference_cells(row.difference, digits))]


def _make_difference_cells(difference: PairedDifference | None, digits: int) -> list[str]:
    """Returns the cells of a difference to the best combination; empty ones if there is none."""
    if difference is None:
        return ["", "", ""]
    d = difference
    interval = f"{d.low:+.{digits}f} to {d.high:+.{digits}f}"
    return [f"{d.mean:+.{digits}f}", interval, "<0.001" if d.p < 0.001 else f"{d.p:.3f}"]


def _format_interval(low: float | None, high: float | None, digits: int) -> str:
    """Returns an interval as text; "-" if there is none."""
    return "-" if low is None or high is None else f"{low:.{digits}f} to {high:.{digits}f}"


def _format_training(row: CombinationRow | RunRow, measure: str) -> str:
    """Returns the training reward or the loss of a row as text."""
    return _format_number(row.training_reward if measure == TRAINING_REWARD else row.loss)


def _format_number(value: float | None) -> str:
    """Returns a number as text; "-" if there is none."""
    return "-" if value is None else format_compact(value)


def make_run_cells(table: SweepTable) -> CellTable:
    """Returns one row per run: its name, how it ended, its last step, and what it is measured by."""
    measure = _find_measure(table)
    return CellTable(
        header=["run", "state", "step", *([measure] if measure else []), "why"],
        rows=[_make_run_row_cells(row, measure) for row in table.runs],
    )


def _make_run_row_cells(row: RunRow, measure: str) -> list[str]:
    """Returns the cells of a run."""
    value = "-" if row.value is None else f"{row.value:.3f}" + ("*" if row.state == "stopped" else "")
    number = value if measure in ("accuracy", "reward") else _format_training(row, measure)
    return [row.name, row.state, str(row.step), *([number] if measure else []), row.why]


def render_markdown(table: SweepTable) -> str:
    """Returns the table as a Markdown page, the content of sweep.md."""
    lines = [f"# Sweep {_escape_cell(table.name)}", "", f"Recipe `{_escape_cell(table.recipe)}`, {_count(table)}.", ""]
    if found := describe_best(table):
        first, *rest = map(_escape_cell, found)
        lines += [" ".join([f"B{first[1:]}.", *rest]), ""]
    lines += [*_render_cells(make_combination_cells(table)), ""]
    lines += [f"- {_escape_cell(note)}" for note in table.notes]
    if commands := [format_eval_command(table, run) for run in table.best_runs]:
        lines += ["", "## The winner on the test split", "", _MEASURE_NOTE, "", "```", *commands, "```"]
    lines += ["", "## Runs", "", *_render_cells(make_run_cells(table))]
    return "\n".join(lines) + "\n"


def format_eval_command(table: SweepTable, run: RunRow, name: str = "", program: str = "cohort") -> str:
    """Returns the command that evaluates a run on the test split. `program` is what it begins with.

    `name` is how it names the run; "" = by the name of the sweep and the number of the run.
    """
    name = name or f"{table.name}/{run.name.partition('-')[0]}"
    words = [f"{name}@{run.step}" if word == f"RUN@{run.step}" else word for word in run.eval_command]
    return escape_line(join_command([program, *words]), _MAX_COMMAND)


def _count(table: SweepTable) -> str:
    """Returns the size of the sweep in words."""
    num, seeds = len(table.combinations), len(table.seeds)
    return f"{num} combination{'s' * (num != 1)} x {seeds} seed{'s' * (seeds != 1)}"


def _render_cells(cells: CellTable) -> list[str]:
    """Returns the lines of a Markdown table."""
    rows = [cells.header, ["---"] * len(cells.header), *cells.rows]
    return [_render_line(row) for row in rows]


def _render_line(cells: Sequence[str]) -> str:
    """Returns one line of a Markdown table."""
    return f"| {' | '.join(_escape_cell(cell) for cell in cells)} |"


def _escape_cell(text: str) -> str:
    """Returns a text that stays in its cell and is no Markdown or HTML: values and errors may hold anything."""
    line = escape_line(text, _MAX_CELL)
    for letter in "\\`|<[":
        line = line.replace(letter, "\\" + letter)
    return line
