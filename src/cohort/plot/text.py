"""Curves as text, for terminals that show no pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cohort.logs.columns import wrap_paragraph
from cohort.logs.curve import draw_braille, find_bounds
from cohort.logs.escape import escape_line
from cohort.logs.widths import cut_text, measure_width
from cohort.plot.chart import Chart
from cohort.plot.scale import format_share, format_value, is_drawable
from cohort.plot.series import Series

_HEIGHTS = (4, 2, 0)  # lines of one curve; the lower ones where a chart has more runs than a terminal has room for


def draw_text(charts: Sequence[Chart], notes: Sequence[str], width: int) -> str:
    """Returns the charts as lines of at most `width` columns, and below them the notes.

    Curves of several runs stand below each other. All curves of a chart have the same axes.
    """
    blocks = [_draw_chart(chart, width, _HEIGHTS[0]) for chart in charts]
    return "\n".join([*_join_blocks(blocks), *_wrap_notes(notes, width)])


def draw_on_screen(charts: Sequence[Chart], notes: Sequence[str], width: int, height: int) -> str:
    """Returns what a terminal of `height` lines shows at once: as many charts as fit, the notes, and what is missing.

    There is always a first chart. If it has too many runs, their curves are lower, then left out, and then only the
    first runs are named. Notes that would take much of the screen are left to the file.
    """
    below = _wrap_notes(notes, width)
    below = below if 3 * len(below) <= height else []
    room = max(4, height - len(below) - 1)
    first = next(
        (block for h in _HEIGHTS if len(block := _draw_chart(charts[0], width, h)) <= room),
        _draw_chart(charts[0], width, _HEIGHTS[-1]),
    )
    if len(first) > room:
        first = [*first[: room - 1], f"... and {len(first) - room + 1} more runs"]
    blocks = [first]
    for chart in charts[1:]:
        block = _draw_chart(chart, width, _HEIGHTS[0])
        if len(_join_blocks([*blocks, block])) > room:
            break
        blocks.append(block)
    num = len(charts) - len(blocks)
    what = f"{num} more {'chart' if num == 1 else 'charts'}"
    more = _wrap_notes([f"{what}: --text prints all, --metrics chooses, and the file has them"] * (num > 0), width)
    return "\n".join([*_join_blocks(blocks), *below, *more])


def _join_blocks(blocks: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of all charts, with a blank line between two."""
    return [line for number, block in enumerate(blocks) for line in (*[""] * (number > 0), *block)]


def _wrap_notes(notes: Sequence[str], width: int) -> list[str]:
    """Returns the notes as lines of at most `width` columns."""
    return [line for note in notes for line in wrap_paragraph(escape_line(note, 1000), width)]


def _draw_chart(chart: Chart, width: int, height: int) -> list[str]:
    """Returns the lines of one chart: its title, and for each run its label, first and last value, and its curve.

    A curve has `height` lines; with 0 there are no curves and no axes.
    """
    log = chart.log and any(is_drawable(p.y, log=True) for s in chart.series for p in s.points)
    format_number = format_share if chart.is_share else format_value
    head = f"{chart.title}{' (log scale)' if log else ''}"
    shown = [series for series in chart.series if series.points]
    curves = [_list_places(series, log) for series in shown]
    bounds = find_bounds([y for places in curves for _, y in places])
    ends = [format_number(10**value if log else value) for value in bounds]
    margin = max(map(len, ends))
    inner = max(8, width - margin - 2)
    start, end = chart.x_range
    head = escape_line(head)
    head += f": {_format_ends(shown[0], format_number)}" if len(chart.series) == 1 and shown else ""
    has_room = chart.meaning and measure_width(head) + len(chart.meaning) + 2 <= width
    lines = [f"{head}  {chart.meaning}" if has_room else cut_text(head, width, keep_end=True)]
    for series, places in zip(shown, curves, strict=True):
        if len(chart.series) > 1:
            label = escape_line(f"{series.label}: {_format_ends(series, format_number)}")
            lines.append(cut_text(label, width, keep_end=True))
        if height:
            rows = draw_braille(places, inner, height, (start, max(end, start + 1)), bounds)
            labels = [ends[1], *[""] * (height - 2), ends[0]]
            lines += [f"{label:>{margin}} │{row}" for label, row in zip(labels, rows, strict=True)]
    if height:
        first, last = format_value(start), f"{format_value(end)} {chart.x_label}"
        # Before the last label there is as much room as the first one leaves.
        lines.append(f"{'':>{margin}}  {first}{last:>{max(1, inner - len(first))}}")
    return lines


def _list_places(series: Series, log: bool) -> list[tuple[float, float]]:
    """Returns the points of a curve, the smooth one if there is one, that can be drawn; y as its logarithm if `log`."""
    points = [p for p in (series.smooth or series.points) if is_drawable(p.y, log)]
    return [(p.x, math.log10(p.y) if log else p.y) for p in points]


def _format_ends(series: Series, format_number: Callable[[float], str]) -> str:
    """Returns the first and the last value of a series, the last one with its interval if it has one."""
    first, last = series.points[0], series.points[-1]
    interval = f" ({format_number(last.low)} to {format_number(last.high)})" if math.isfinite(last.low) else ""
    return f"{format_number(first.y)} -> {format_number(last.y)}{interval}"
