"""The table of runs as lines of text, for a terminal of any width or for a pipe."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cohort.inspect.runs.differences import find_shared_settings, format_differences, shorten_name, shorten_names
from cohort.inspect.runs.query import format_plain, get_value
from cohort.logs.curve import BLOCKS, draw_blocks
from cohort.logs.escape import escape_line
from cohort.logs.numbers import format_compact, format_duration
from cohort.logs.widths import cut_text, measure_width, pad_text
from cohort.run.store.records import Curve
from cohort.run.summary import RunSummary

_GAP = "  "
_MIN_NAME, _MAX_NAME = 26, 44  # columns of a name that is cut, on a terminal
_MAX_CELL = 10_000  # characters of a cell where nothing is cut for the width
_MAX_NOTES = 10  # lines about broken and crashed runs below the table
_MAX_COMMON = 300  # characters of the note about what all runs share
_LAST_NEEDED = 5  # rank of the last column that is shown also if it is empty
VALIDATION_MARK = "v"  # behind an accuracy
_UNITS = (("y", 365 * 86400), ("w", 7 * 86400), ("d", 86400), ("h", 3600), ("m", 60))


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of the table: its title and its cells, and how narrow it may become."""

    title: str
    cells: list[str]
    rank: int  # of columns that do not all fit, those with the smallest ranks are shown
    least: int = 0  # columns of the terminal that it needs at least; 0 = it is never cut
    is_common: bool = False  # whether a note says its cells, which are all equal
    keep_end: bool = False  # whether a cell that is cut keeps its end too
    width: int = field(init=False)  # columns that the widest cell takes

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", max(map(measure_width, (self.title, *self.cells))))


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFormat:
    """How the table is drawn."""

    width: int | None  # columns of the terminal; None = there is none: everything is shown, and nothing is cut
    blocks: str = BLOCKS  # characters of the small curves, lowest first
    mark: str = "…"  # stands for what was cut


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLine:
    """A line of the table, escaped. `state` is that of its run, and begins after `start` characters; "" = no run."""

    text: str
    state: str = ""
    start: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunsTable:
    """The table: its lines, the first one with the titles, and what is said below it. All text is escaped."""

    lines: list[TableLine]
    notes: list[str]


def format_runs(runs: Sequence[RunSummary], metrics: Sequence[str], format: TableFormat) -> RunsTable:
    """Returns the table. `metrics` are names of further columns.

    On a terminal, columns are left out and cut until a line fits, what is equal in all runs is said once in a note, and
    notes about broken and crashed runs that have no room stand below.
    """
    columns = all_columns = make_columns(runs, metrics, format)
    widths = [column.width for column in columns]
    notes: list[str] = []
    if format.width is not None:
        columns, widths = fit_columns(columns, format.width)
        notes = [*_describe_common(runs, all_columns), *_describe_missing(all_columns, columns)]
    titles = [column.title for column in columns]
    lines = []
    for i in range(-1, len(runs)):
        cells = [column.title if i < 0 else column.cells[i] for column in columns]
        padded = [
            pad_text(cut_text(cell, width, format.mark, keep_end=column.keep_end), width)
            for cell, width, column in zip(cells, widths, columns, strict=True)
        ]
        place = titles.index("state") if "state" in titles else 0
        start = sum(len(cell) + len(_GAP) for cell in padded[:place])
        state = runs[i].state if i >= 0 and place else ""
        lines.append(TableLine(text=_GAP.join(padded).rstrip(), state=state, start=start))
    if not any(c.title == "note" and c.width <= w for c, w in zip(columns, widths, strict=True)):
        lines += [TableLine(text=text) for text in _list_notes(runs)]
    return RunsTable(lines=lines, notes=notes)


def make_columns(runs: Sequence[RunSummary], metrics: Sequence[str], format: TableFormat) -> list[Column]:
    """Returns all columns of the table with their cells, in the order in which they are shown."""
    # Most runs show their reward. A curve of another kind has its label in the cell, if there are both.
    labels = {run.curve.label for run in runs}
    label = labels.pop() if len(labels) == 1 else Curve().label
    length = 8 if format.width is not None and format.width < 100 else 16
    is_short = format.width is not None
    shared = find_shared_settings(runs)
    words = shorten_names(runs) if is_short else {}
    now = time.time()
    limit = _MAX_CELL if format.width is None else format.width + 1
    names = [escape_line(shorten_name(run) if is_short and len(runs) > 1 else run.name, limit) for run in runs]
    # What all runs share is said below the table. In a pipe, every line has everything.
    hidden = shared if is_short and len(runs) > 1 else set()
    differences = [escape_line(format_differences(run, shared, hidden, words), limit) for run in runs]
    return [
        Column(title="name", cells=names, rank=0, least=_MIN_NAME, keep_end=True),
        Column(title="state", cells=[run.state for run in runs], rank=2),
        Column(title="step", cells=[_format_step(run) for run in runs], rank=4),
        *_make_result_columns(runs),
        Column(title=label, cells=[_format_curve(run, length, format.blocks, label) for run in runs], rank=5),
        *(
            Column(title=escape_line(name), cells=[_format_value(run, name) for run in runs], rank=1, least=16)
            for name in metrics
        ),
        Column(title="differences", cells=differences, rank=6, least=12),
        _make_text_column("recipe", [escape_line(run.recipe, limit) for run in runs], rank=7, least=10),
        _make_text_column("model", [escape_line(run.model, limit) for run in runs], rank=8, least=8),
        Column(title="age", cells=[format_age(now - run.updated) for run in runs], rank=9),
        Column(title="note", cells=[escape_line(format_note(run), limit) for run in runs], rank=10, least=16),
    ]


def _make_text_column(title: str, cells: list[str], *, rank: int, least: int) -> Column:
    """Returns a column of which a note says the cells, if they are all equal."""
    return Column(
        title=title,
        cells=cells,
        rank=rank,
        least=least,
        is_common=len(cells) > 1 and cells.count(cells[0]) == len(cells),
    )


def fit_columns(columns: Sequence[Column], width: int) -> tuple[list[Column], list[int]]:
    """Returns the columns that fit into `width`, and the width that each of them gets.

    Columns without content, and those that are equal in all rows, are left out.
    """
    least = [min(c.width, c.least) if c.least else c.width for c in columns]
    kept: dict[int, int] = {}  # widths by the index of the column
    room = width + len(_GAP)
    for i in sorted(range(len(columns)), key=lambda i: columns[i].rank):
        column = columns[i]
        if column.rank > _LAST_NEEDED and (column.is_common or not any(column.cells)):
            continue
        # Without a name there is no table.
        needed = min(least[i], width) + len(_GAP) if column.rank == 0 else least[i] + len(_GAP)
        if needed <= room:
            kept[i] = needed - len(_GAP)
            room -= needed
    # What is left goes to the columns that are cut, the first of them first. A long name does not get all of it.
    for i in sorted(kept):
        most = min(columns[i].width, max(_MAX_NAME, least[i])) if columns[i].keep_end else columns[i].width
        more = max(0, min(room, most - kept[i]))
        kept[i] += more
        room -= more
    return [columns[i] for i in sorted(kept)], [kept[i] for i in sorted(kept)]


def _describe_common(runs: Sequence[RunSummary], columns: Sequence[Column]) -> list[str]:
    """Returns a note about what is equal in all runs, and therefore not in the table; [] if nothing is."""
    common = [f"{c.title} {c.cells[0]}" for c in columns if c.is_common and c.cells[0]]
    shared = find_shared_settings(runs) if len(runs) > 1 else set()
    run = next((run for run in runs if shared <= run.differences.values.keys()), None)
    if run is not None:
        common += [f"{name}={format_plain(value)}" for name, value in run.differences.values.items() if name in shared]
    return [f"all runs: {escape_line(', '.join(common), _MAX_COMMON)}"] if common else []


def _describe_missing(columns: Sequence[Column], kept: Sequence[Column]) -> list[str]:
    """Returns a note about columns for which there is no room; [] if all are there."""
    titles = {column.title for column in kept}
    missing = [c.title for c in columns if c.title not in titles and any(c.cells) and not c.is_common]
    return [f"no room for: {', '.join(missing)} (a wider terminal, a pipe and --json have all)"] if missing else []


def format_note(run: RunSummary) -> str:
    """Returns what there is to say about the state of a run: why it ended, or when it will."""
    if run.state == "running" and not math.isnan(run.eta):
        return f"eta {format_duration(run.eta)}"
    return run.note


def format_age(seconds: float) -> str:
    """Returns how long ago something was, in its largest unit; "" = not known (NaN).

    >>> [format_age(s) for s in (5, 59 * 60, 26 * 3600, 400 * 86400, float("nan"))]
    ['5s', '59m', '1d', '1y', '']
    """
    if not abs(seconds) < 1e12:
        return ""
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def _format_step(run: RunSummary) -> str:
    """Returns the newest step and the number of steps, as in "12/100"."""
    return f"{run.step}/{run.num_steps or '?'}" if run.step or run.num_steps else ""


def _make_result_columns(runs: Sequence[RunSummary]) -> list[Column]:
    """Returns the column of held-out accuracies, that of held-out mean rewards, or both if there are both."""
    accuracies = [_format_result(run.accuracy, run) for run in runs]
    rewards = [_format_result(run.eval_reward, run) for run in runs]
    columns = [Column(title="accuracy", cells=accuracies, rank=3)] if any(accuracies) or not any(rewards) else []
    return columns + ([Column(title="eval reward", cells=rewards, rank=3)] if any(rewards) else [])


def _format_result(value: float, run: RunSummary) -> str:
    """Returns the newest held-out accuracy or mean reward and its step, as in "0.512 @100"; "" if there is none.

    One of the validation split has a mark: it cannot be compared with those of the test split.
    """
    if math.isnan(value):
        return ""
    # Whatever a damaged database has in this place must fit into the column.
    shown = f"{value:.3f}" if 0 <= value <= 1 else format_compact(value)
    mark = VALIDATION_MARK if run.split == "validation" else ""
    return f"{shown}{mark} @{run.accuracy_step}"


def _format_curve(run: RunSummary, length: int, blocks: str, title: str) -> str:
    """Returns the newest value of the run's curve and its history as a small curve; "" if there is none.

    Its label stands before it if that is not the title of the column.
    """
    if math.isnan(run.score) and not run.values:
        return ""
    label = "" if run.curve.label == title else f"{run.curve.label} "
    return f"{label}{format_compact(run.score):<5} {draw_blocks(list(run.values.items()), length, blocks)}".rstrip()


def _format_value(run: RunSummary, name: str) -> str:
    """Returns a metric or setting as the cell of a further column; "" if the run does not have it."""
    value = get_value(run, name)
    if value is None:
        return ""
    is_metric = isinstance(value, float) and name not in run.settings
    return escape_line(format_compact(value) if is_metric else format_plain(value), _MAX_CELL)


def _list_notes(runs: Sequence[RunSummary]) -> list[str]:
    """Returns lines about runs that are broken or crashed, and an empty line before them; [] if there are none."""
    noted = [run for run in runs if run.note and run.state in ("broken", "crashed")]
    lines = [f"{escape_line(run.name)}: {escape_line(run.note)}" for run in noted[:_MAX_NOTES]]
    if more := len(noted) - _MAX_NOTES:
        lines += [f"and {more} more: --filter state=broken or state=crashed"] if more > 0 else []
    return ["", *lines] if lines else []
