"""The page of a picture: charts in a grid, under a title and a legend of the runs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from cohort.plot.chart import HEIGHT, INK, SOFT, WIDTH, Chart, choose_style, draw_chart
from cohort.plot.svg import MARK, escape_xml, estimate_width, make_element, shorten_text, write_text

_MARGIN = 12.0
_GAP = 14.0  # between charts
_LEGEND_FONT = 12.0
_LEGEND_ROW = 19.0
_NOTE_FONT = 11.0
_NOTE_ROW = 15.0
_SAMPLE = 40.0  # length of the line in the legend
_LONGEST_LABEL = 330.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Everything that a picture shows."""

    title: str
    labels: Sequence[str]  # one per run; a single run needs no legend
    charts: Sequence[Chart]
    note: str = ""  # about all charts, such as how they are smoothed
    footnotes: Sequence[str] = ()  # below the charts, such as why a curve ends early


def draw_page(page: Page) -> str:
    """Returns a picture as the text of an SVG file.

    It has no script and loads nothing. It has a white background, so that it is readable on a dark page too.
    """
    num = len(page.charts)
    columns = 1 if num <= 1 else 2 if num in (2, 4) else 3
    rows = -(-num // columns)
    width = 2 * _MARGIN + columns * WIDTH + (columns - 1) * _GAP
    top = _MARGIN + 14
    lines = [
        make_element("title", escape_xml(page.title)),
        make_element("desc", escape_xml(_describe(page), 2000)),
        make_element("rect", width="100%", height="100%", fill="#ffffff"),
        write_text(
            shorten_text(page.title, 15, width - 2 * _MARGIN), _MARGIN + 4, top, 15, font_weight="bold", fill=INK
        ),
    ]
    if page.note:
        top += 17
        lines.append(write_text(shorten_text(page.note, 11, width - 2 * _MARGIN), _MARGIN + 4, top, 11, fill=SOFT))
    top += 8
    if len(page.labels) > 1:
        legend, height = _draw_legend(page.labels, width - 2 * _MARGIN)
        lines.append(make_element("g", *legend, transform=f"translate({_MARGIN:.0f},{top:.0f})"))
        top += height
    top += 8
    for i, chart in enumerate(page.charts):
        x = _MARGIN + (i % columns) * (WIDTH + _GAP)
        y = top + (i // columns) * (HEIGHT + _GAP)
        # One line per element keeps differences between two versions of a picture readable.
        content = "\n".join(draw_chart(chart))
        lines.append(make_element("g", f"\n{content}\n", transform=f"translate({x:.0f},{y:.0f})"))
    height = top + rows * (HEIGHT + _GAP) - _GAP + _MARGIN
    for line in _wrap_footnotes(page.footnotes, width - 2 * _MARGIN - 4):
        lines.append(write_text(line, _MARGIN + 4, height, _NOTE_FONT, fill=SOFT))
        height += _NOTE_ROW
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    font = 'font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {MARK} role="img" {size} {font}>'
    return "\n".join([head, *lines, "</svg>"]) + "\n"


def _wrap_footnotes(notes: Sequence[str], width: float) -> list[str]:
    """Returns the notes as lines of about `width` pixels."""
    lines: list[str] = []
    for note in notes:
        most = int(len(note) * width / estimate_width(note, _NOTE_FONT))
        lines += textwrap.wrap(note, max(20, most))
    return lines


def _describe(page: Page) -> str:
    """Returns what the picture shows in a sentence, for readers who hear it."""
    names = ", ".join(chart.title for chart in page.charts) or "nothing"
    runs = f" of {len(page.labels)} runs: {', '.join(page.labels)}" if len(page.labels) > 1 else ""
    return f"Curves of {names}{runs}"


def _draw_legend(labels: Sequence[str], width: float) -> tuple[list[str], float]:
    """Returns the legend, one entry per run in columns of equal width, and its height in pixels."""
    shown = [shorten_text(label, _LEGEND_FONT, min(_LONGEST_LABEL, width - _SAMPLE - 30)) for label in labels]
    column = max(estimate_width(label, _LEGEND_FONT) for label in shown) + _SAMPLE + 34
    per_row = max(1, min(len(shown), int(width // column)))
    lines = []
    for i, label in enumerate(shown):
        x = 4 + (i % per_row) * column
        y = 10 + (i // per_row) * _LEGEND_ROW
        style = choose_style(i)
        lines.append(
            make_element(
                "path",
                d=f"M{x:.1f} {y:.1f}h{_SAMPLE:.0f}",
                stroke=style.colour,
                stroke_dasharray=style.dash,
                stroke_width="1.7",
            )
        )
        lines.append(style.draw_marker(x + _SAMPLE / 2, y))
        lines.append(write_text(label, x + _SAMPLE + 8, y + 4, _LEGEND_FONT, fill=INK))
    return lines, 4 + -(-len(shown) // per_row) * _LEGEND_ROW
