"""One chart: the curves of one metric, all runs overlaid, with axes, grid and intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from cohort.plot.scale import Scale, is_drawable, make_linear_scale, make_log_scale
from cohort.plot.series import Point, Series
from cohort.plot.svg import estimate_width, join_points, make_element, shorten_text, write_text

WIDTH, HEIGHT = 344.0, 220.0
INK, SOFT, GRID = "#222222", "#5c5c5c", "#e3e3e3"
_TOP, _BOTTOM, _RIGHT = 41.0, 36.0, 10.0  # room around the curves: for titles, the x axis, and nothing
_INSET = 7.0  # room left and right of the curves, for markers and bars
_SMALL = 10.0  # font size of numbers and notes
_MOST_BARS = 24  # intervals of one curve that are drawn as bars; more become a band

# Each run has a colour, a dash pattern and a marker. Colours differ in lightness, also for colour-blind readers. The
# numbers of colours, dashes and markers have no common factor, so that 210 runs look different.
COLOURS = ("#1d3b8b", "#e07b00", "#147a50", "#d65fa0", "#4db1e6", "#7a1f3d")
DASHES = (None, "7 3", "2 2.5", "10 3 2 3", "14 4")
# Markers as paths around (0, 0), about 7 pixels large.
MARKERS = (
    "M-3 0A3 3 0 1 0 3 0A3 3 0 1 0 -3 0Z",
    "M-2.7 -2.7H2.7V2.7H-2.7Z",
    "M0 -3.6L3.4 2.6H-3.4Z",
    "M0 -4L3.6 0L0 4L-3.6 0Z",
    "M0 3.6L3.4 -2.6H-3.4Z",
    "M-3.6 -1.1H-1.1V-3.6H1.1V-1.1H3.6V1.1H1.1V3.6H-1.1V1.1H-3.6Z",
    "M-3.8 -1H3.8V1H-3.8Z",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """What one chart shows: the series of one metric, one per run."""

    title: str
    meaning: str  # of the metric, in a few words; "" = not known
    x_label: str
    x_range: tuple[float, float]  # lowest and highest place on the x axis, the same for all charts of a picture
    series: Sequence[Series]  # one per run, in the order of the runs; one without points is not drawn
    log: bool = False
    is_share: bool = False  # whether values are shares, written with three decimals
    bars: bool = False  # whether intervals are those of evaluations, each point of which is marked


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStyle:
    """How the curve of a run looks, by its number among the runs."""

    colour: str
    dash: str | None
    marker: str

    def draw_marker(self, x: float, y: float) -> str:
        """Returns the marker of the run at a place."""
        return make_element(
            "path",
            d=self.marker,
            transform=f"translate({x:.1f},{y:.1f})",
            fill=self.colour,
            stroke="#ffffff",
            stroke_width="0.6",
        )


def choose_style(index: int) -> RunStyle:
    """Returns the style of the run with this index."""
    return RunStyle(
        colour=COLOURS[index % len(COLOURS)], dash=DASHES[index % len(DASHES)], marker=MARKERS[index % len(MARKERS)]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The rectangle of the curves inside a chart, with the scales of its axes."""

    left: float
    x: Scale
    y: Scale

    @property
    def right(self) -> float:
        """The right end, in pixels."""
        return WIDTH - _RIGHT

    @property
    def bottom(self) -> float:
        """The lower end, in pixels; y grows downwards."""
        return HEIGHT - _BOTTOM

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Returns the pixels of a point."""
        return self.place_x(x), self.place_y(y)

    def place_x(self, x: float) -> float:
        """Returns the pixel column of a place on the x axis."""
        return self.left + _INSET + self.x.place(x) * (self.right - self.left - 2 * _INSET)

    def place_y(self, y: float) -> float:
        """Returns the pixel row of a value."""
        return self.bottom - self.y.place(y) * (self.bottom - _TOP)


def draw_chart(chart: Chart) -> list[str]:
    """Returns the elements of a chart, whose upper left corner is at (0, 0)."""
    # A log axis without a value above 0 would be empty.
    log = chart.log and any(is_drawable(p.y, log=True) for s in chart.series for p in s.points)
    frame = _make_frame(chart, log)
    lines = [
        *_draw_titles(chart, log),
        *_draw_axes(frame, chart.x_label),
    ]
    behind: list[str] = []
    front: list[str] = []
    for index, series in enumerate(chart.series):
        shift = _shift_bars(index, len(chart.series))
        below, above = _draw_series(chart, frame, series, choose_style(index), shift)
        behind += below
        front += above
    # The main curve of no run lies below the thin lines of another.
    return [*lines, *behind, *front]


def _make_frame(chart: Chart, log: bool) -> Frame:
    """Returns the frame whose axes hold all points and intervals of the chart."""
    points = [p for s in chart.series for p in (*s.points, *s.smooth)]
    ys = [v for p in points for v in (p.y, p.low, p.high) if is_drawable(v, log)]
    y = make_log_scale(ys) if log else make_linear_scale(ys)
    widest = max((estimate_width(label, _SMALL) for label in y.labels), default=0.0)
    return Frame(left=max(30.0, widest + 10), x=make_linear_scale(chart.x_range, 6, pad=False, whole=True), y=y)


def _draw_titles(chart: Chart, log: bool) -> list[str]:
    """Returns the title of a chart, and below it the meaning of its metric and notes about its values."""
    notes = [chart.meaning] if chart.meaning else []
    kind = " (log scale)" if log else " (no log scale: no value above 0)" if chart.log else ""
    values = [p.y for s in chart.series for p in s.points]
    if num_bad := sum(not math.isfinite(v) for v in values):
        notes.append(f"{num_bad} not finite")
    if num_other := sum(not is_drawable(v, log) for v in values) - num_bad:
        notes.append(f"{num_other} not above 0" if log else f"{num_other} too large to draw")
    room = WIDTH - 12
    return [
        write_text(shorten_text(chart.title + kind, 13, room), 8, 14, 13, font_weight="bold", fill=INK),
        write_text(shorten_text("; ".join(notes), _SMALL, room), 8, 28, _SMALL, fill=SOFT),
    ]


def _draw_axes(frame: Frame, x_label: str) -> list[str]:
    """Returns grid lines with the numbers of both axes, and the name of the x axis."""
    lines = []
    for tick, label in zip(frame.y.ticks, frame.y.labels, strict=True):
        y = frame.place_y(tick)
        lines.append(make_element("path", d=f"M{frame.left:.1f} {y:.1f}H{frame.right:.1f}", stroke=GRID))
        lines.append(write_text(label, frame.left - 5, y + 3.5, _SMALL, text_anchor="end", fill=SOFT))
    for tick, label in zip(frame.x.ticks, frame.x.labels, strict=True):
        x = frame.place_x(tick)
        lines.append(make_element("path", d=f"M{x:.1f} {frame.bottom:.1f}v4", stroke=SOFT))
        lines.append(write_text(label, x, frame.bottom + 14, _SMALL, text_anchor="middle", fill=SOFT))
    middle = (frame.left + frame.right) / 2
    lines.append(write_text(x_label, middle, frame.bottom + 27, _SMALL, text_anchor="middle", fill=SOFT))
    lines.append(make_element("path", d=f"M{frame.left:.1f} {frame.bottom:.1f}H{frame.right:.1f}", stroke=SOFT))
    return lines


def _shift_bars(index: int, num: int) -> float:
    """Returns by how many pixels the bars of a run are moved aside, so that bars of several runs do not overlap."""
    return (index - (num - 1) / 2) * min(4.0, 2 * _INSET / max(1, num - 1))


def _draw_series(
    chart: Chart, frame: Frame, series: Series, style: RunStyle, shift: float
) -> tuple[list[str], list[str]]:
    """Returns what is drawn of a run: (bars or a band for its intervals and a thin line, its curve with markers)."""
    log = frame.y.is_log
    num = len(chart.series)
    has_bars = chart.bars and len(series.points) <= _MOST_BARS
    shift = shift if has_bars else 0.0
    if has_bars:
        opacity = None if num <= 4 else "0.5"
        bars = [p for p in series.points if _has_interval(p, log)]
        behind = [_draw_bar(frame, p, style, shift, opacity) for p in bars]
    else:
        behind = _draw_band(frame, series.points, style)
    if series.smooth:
        opacity = "0.4" if num <= 2 else "0.25" if num <= 4 else "0.12"
        behind += _draw_line(frame, series.points, style, opacity=opacity)
    curve = series.smooth or series.points
    front = _draw_line(frame, curve, style, shift)
    drawable = [p for p in curve if is_drawable(p.y, log)]
    for point in drawable if has_bars else _choose_marked(frame, drawable, style):
        x, y = frame.place(point.x, point.y)
        front.append(style.draw_marker(x + shift, y))
    return behind, front


def _has_interval(point: Point, log: bool) -> bool:
    """Returns whether a point has an interval that can be drawn."""
    return is_drawable(point.low, log) and is_drawable(point.high, log)


def _draw_bar(frame: Frame, point: Point, style: RunStyle, shift: float, opacity: str | None) -> str:
    """Returns the interval of a point as a vertical bar with short ends."""
    x = frame.place_x(point.x) + shift
    top, bottom = frame.place_y(point.high), frame.place_y(point.low)
    path = f"M{x - 3:.1f} {top:.1f}h6M{x:.1f} {top:.1f}V{bottom:.1f}M{x - 3:.1f} {bottom:.1f}h6"
    return make_element("path", d=path, stroke=style.colour, stroke_width="1.2", stroke_opacity=opacity, fill="none")


def _draw_band(frame: Frame, points: Sequence[Point], style: RunStyle) -> list[str]:
    """Returns the intervals of all points as bands between their lower and upper ends; [] if there are none."""
    bands = []
    for part in _split_stretches(points, lambda p: _has_interval(p, frame.y.is_log)):
        upper = [frame.place(p.x, p.high) for p in part]
        lower = [frame.place(p.x, p.low) for p in reversed(part)]
        path = join_points([*upper, *lower]) + "Z"
        bands.append(make_element("path", d=path, fill=style.colour, fill_opacity="0.15"))
    return bands


def _draw_line(
    frame: Frame, points: Sequence[Point], style: RunStyle, shift: float = 0.0, opacity: str = ""
) -> list[str]:
    """Returns the line through the points, with gaps where a value cannot be drawn.

    With `opacity` it is a thin line that lies behind others.
    """
    parts = []
    for part in _split_stretches(points, lambda p: is_drawable(p.y, frame.y.is_log)):
        places = thin_out([frame.place(p.x, p.y) for p in part])
        # A single point would be a line without length: it gets a short one.
        places = places if len(places) > 1 else [(places[0][0] - 1, places[0][1]), (places[0][0] + 1, places[0][1])]
        parts.append(join_points((x + shift, y) for x, y in places))
    if not parts:
        return []
    look = {"stroke_width": "0.8", "stroke_opacity": opacity} if opacity else {"stroke_width": "1.7"}
    dash = None if opacity else style.dash
    path = "".join(parts)
    return [
        make_element(
            "path", d=path, fill="none", stroke=style.colour, stroke_dasharray=dash, stroke_linejoin="round", **look
        )
    ]


def _split_stretches(points: Sequence[Point], can_draw: Callable[[Point], bool]) -> Iterator[list[Point]]:
    """Yields the longest stretches of points that can be drawn and are not divided by a gap."""
    part: list[Point] = []
    for point in points:
        good = can_draw(point)
        if part and (point.after_gap or not good):
            yield part
            part = []
        if good:
            part.append(point)
    if part:
        yield part


def thin_out(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the places of a line with at most four per pixel column: its first, lowest, highest and last one.

    The line looks the same, because all others lie between the lowest and the highest.
    """
    kept: list[tuple[float, float]] = []
    for _, column in groupby(places, key=lambda place: math.floor(place[0])):
        part = list(column)
        if len(part) > 4:
            lowest = min(range(len(part)), key=lambda i: part[i][1])
            highest = max(range(len(part)), key=lambda i: part[i][1])
            part = [part[i] for i in sorted({0, lowest, highest, len(part) - 1})]
        kept += part
    return kept


def _choose_marked(frame: Frame, points: Sequence[Point], style: RunStyle) -> list[Point]:
    """Returns the points of a long curve that get a marker: about six, at other places for each run.

    A curve of few points has a marker at each of them.
    """
    if len(points) <= 8:
        return list(points)
    number = MARKERS.index(style.marker)
    gap = (frame.right - frame.left) / 6
    start = frame.left + gap * (0.3 + 0.6 * ((number * 3) % len(MARKERS)) / len(MARKERS))
    marked = []
    for point in points:
        if frame.place_x(point.x) >= start:
            marked.append(point)
            start += gap * max(1, math.ceil((frame.place_x(point.x) - start + 1e-9) / gap))
    return marked
