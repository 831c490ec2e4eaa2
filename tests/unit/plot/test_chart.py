"""Charts and pages: what is drawn where, read back from the SVG."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

from cohort.plot.chart import COLOURS, DASHES, HEIGHT, MARKERS, WIDTH, Chart, choose_style, draw_chart, thin_out
from cohort.plot.page import Page, draw_page
from cohort.plot.series import Point, Series
from tests.unit.plot.test_svg import HOSTILE

SVG = "{http://www.w3.org/2000/svg}"


def make_series(values: dict[float, float], label: str = "a") -> Series:
    return Series(label=label, points=tuple(Point(x=x, y=y) for x, y in values.items()))


def make_chart(*series: Series, **changes) -> Chart:
    xs = [p.x for s in series for p in s.points] or [0.0]
    values = {"title": "loss", "meaning": "", "x_label": "step", "x_range": (min(xs), max(xs)), "series": series}
    return Chart(**{**values, **changes})


def lines_of(chart: Chart, index: int = 0) -> list[str]:
    """Returns the data of the thick lines of a run."""
    colour = choose_style(index).colour
    found = [e for e in draw_chart(chart) if f'stroke="{colour}"' in e and 'stroke-width="1.7"' in e]
    return [re.search(r'd="([^"]*)"', e)[1] for e in found]  # type: ignore[index]


def texts_of(elements: list[str]) -> list[str]:
    return [ElementTree.fromstring(e).text or "" for e in elements if e.startswith("<text")]


def test_a_line_rises_where_values_rise():
    [line] = lines_of(make_chart(make_series({0: 0.0, 1: 1.0, 2: 4.0})))
    places = [tuple(map(float, pair.split())) for pair in line[1:].split("L")]
    xs, ys = zip(*places, strict=True)
    assert xs[1] - xs[0] == xs[2] - xs[1] > 0
    # Pixels grow downwards, and 3 is three times 1.
    assert abs((ys[1] - ys[2]) - 3 * (ys[0] - ys[1])) < 0.3 and ys[0] > ys[1] > ys[2]
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in places)


def test_what_is_not_finite_is_a_gap_and_said():
    chart = make_chart(make_series({0: 1.0, 1: 2.0, 2: math.nan, 3: math.inf, 4: 5.0, 5: 6.0, 6: 1e200}))
    [line] = lines_of(chart)
    assert line.count("M") == 2 and "nan" not in line and "inf" not in line
    assert "2 not finite; 1 too large to draw" in texts_of(draw_chart(chart))


def test_a_gap_divides_the_line():
    points = [Point(x=float(i), y=1.0, after_gap=i == 2) for i in range(4)]
    [line] = lines_of(make_chart(Series(label="a", points=tuple(points))))
    assert line.count("M") == 2 and line.count("L") == 2


def test_single_points_and_nothing_at_all_are_drawn():
    for values in ({5.0: 3.0}, {0.0: 0.0}, {1.0: math.nan}, {0.0: 1.0, 1.0: math.nan, 2.0: 1.0}):
        elements = draw_chart(make_chart(make_series(values)))
        assert not any("nan" in e for e in elements if e.startswith("<path"))
        num_markers = sum("translate" in e for e in elements)
        assert num_markers == sum(math.isfinite(v) for v in values.values())
    assert draw_chart(make_chart(make_series({})))


def test_a_log_axis_says_so_and_leaves_out_what_is_not_above_zero():
    chart = make_chart(make_series({0: 1.0, 1: 10.0, 2: 100.0, 3: 0.0, 4: -1.0}), log=True)
    texts = texts_of(draw_chart(chart))
    assert "loss (log scale)" in texts and "2 not above 0" in texts
    [line] = lines_of(chart)
    ys = [float(pair.split()[1]) for pair in line[1:].split("L")]
    assert len(ys) == 3 and abs((ys[0] - ys[1]) - (ys[1] - ys[2])) < 0.3
    nothing = texts_of(draw_chart(make_chart(make_series({0: 0.0, 1: -1.0}), log=True)))
    assert "loss (no log scale: no value above 0)" in nothing


def test_intervals_are_bars_beside_each_other():
    points = (Point(x=0, y=0.5, low=0.4, high=0.6), Point(x=10, y=0.9, low=math.nan, high=math.nan))
    chart = make_chart(Series(label="a", points=points), Series(label="b", points=points), bars=True)
    bars = [e for e in draw_chart(chart) if 'stroke-width="1.2"' in e]
    starts = [float(re.search(r'd="M([\d.]+)', bar)[1]) for bar in bars]  # type: ignore[index]
    assert len(bars) == 2 and starts[1] - starts[0] == 4.0


def test_many_intervals_are_a_band():
    points = tuple(Point(x=float(i), y=0.5, low=0.4, high=0.6) for i in range(100))
    elements = draw_chart(make_chart(Series(label="a", points=points), bars=True))
    assert sum("fill-opacity" in e for e in elements) == 1
    assert not any('stroke-width="1.2"' in e for e in elements)


def test_a_smoothed_curve_keeps_the_raw_one_behind_it():
    points = tuple(Point(x=float(i), y=float(i % 2)) for i in range(20))
    smooth = tuple(Point(x=float(i), y=0.5) for i in range(20))
    elements = draw_chart(make_chart(Series(label="a", points=points, smooth=smooth)))
    faint = next(i for i, e in enumerate(elements) if "stroke-opacity" in e)
    thick = next(i for i, e in enumerate(elements) if 'stroke-width="1.7"' in e)
    assert faint < thick


def test_runs_differ_without_colours():
    looks = [(s.dash, s.marker) for s in map(choose_style, range(len(DASHES) * len(MARKERS)))]
    assert len(set(looks)) == 35
    assert len({choose_style(i) for i in range(200)}) == 200


def test_colours_differ_in_lightness():
    """Relative luminance of sRGB: neighbours in the legend are told apart on grey paper."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    values = [luminance(colour) for colour in COLOURS]
    contrasts = [(max(a, b) + 0.05) / (min(a, b) + 0.05) for a, b in itertools.pairwise(values)]
    assert min(contrasts[:3]) > 1.5, contrasts
    assert all(1.05 / (v + 0.05) > 2 for v in values), "each is visible on white"


def test_thinning_keeps_the_outline():
    places = [(i / 100, math.sin(i)) for i in range(10_000)]
    thin = thin_out(places)
    assert len(thin) <= 400
    for column in range(100):
        ys = [y for x, y in places if int(x) == column]
        kept = [y for x, y in thin if int(x) == column]
        assert (min(ys), max(ys)) == (min(kept), max(kept))
    assert thin == sorted(thin, key=lambda place: place[0]) and thin[0] == places[0] and thin[-1] == places[-1]


def test_a_page_is_safe_and_whole_with_hostile_names():
    series = [make_series({0: 1.0, 1: 2.0}, label) for label in (HOSTILE, "b" * 5000)]
    charts = [make_chart(*series, title=HOSTILE, meaning=HOSTILE) for _ in range(7)]
    page = Page(title=HOSTILE, labels=[s.label for s in series], charts=charts, note=HOSTILE)
    text = draw_page(page)
    root = ElementTree.fromstring(text)
    assert {e.tag.removeprefix(SVG) for e in root.iter()} == {"svg", "title", "desc", "rect", "text", "path", "g"}
    assert not any("href" in name or name.startswith("on") for e in root.iter() for name in e.attrib)
    assert text == draw_page(page)


def test_charts_and_legend_do_not_overlap():
    for num_runs in (1, 2, 7, 40):
        series = [make_series({0: 1.0, 1: 2.0}, f"run number {i}") for i in range(num_runs)]
        charts = [make_chart(*series)] * 5
        root = ElementTree.fromstring(draw_page(Page(title="t", labels=[s.label for s in series], charts=charts)))
        groups = [tuple(map(float, re.findall(r"[\d.]+", e.get("transform", "")))) for e in root if e.tag == SVG + "g"]
        charts_at = groups[1:] if num_runs > 1 else groups
        assert len(charts_at) == 5
        legend = root.find(f"{SVG}g") if num_runs > 1 else None
        if legend is not None:
            lowest = groups[0][1] + max(float(e.get("y", 0)) for e in legend.iter(SVG + "text"))
            assert lowest < charts_at[0][1]
        width, height = map(float, root.get("viewBox", "").split()[2:])
        assert all(x + WIDTH <= width and y + HEIGHT <= height for x, y in charts_at)
        assert len(set(charts_at)) == 5
