"""The curves of a run as an SVG picture: one small chart per metric, and the evaluations with their intervals.

    python scripts/curves.py runs/RUN --out curves.svg [--metrics reward/mean length/mean entropy] [--title TEXT]

It needs only the standard library and reads the metrics.jsonl and eval/*.json of the run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

METRICS = ("reward/mean", "length/mean", "entropy", "grad_norm", "sampler_gap/mean")
# Sizes of a chart in pixels, charts per row, and the space left of a chart for its numbers.
WIDTH = 340
HEIGHT = 200
COLUMNS = 3
MARGIN = 54
# Colours of text, curves and grid.
INK = "#333333"
LINE = "#2a6fbb"
FAINT = "#dddddd"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: a curve through `points` (step, value), and vertical bars (step, low, high) for intervals."""

    title: str
    points: list[tuple[float, float]]
    bars: list[tuple[float, float, float]]


def read_charts(run: Path, metrics: Sequence[str]) -> list[Chart]:
    """Returns the chart of the evaluations and one per metric of `metrics`, without those that have no values."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    charts = [_read_evaluations(run)]
    for name in metrics:
        points = [(row["step"], row["metrics"][name]) for row in rows if name in row["metrics"]]
        if points:
            charts.append(Chart(title=name, points=points, bars=[]))
    return [chart for chart in charts if chart.points]


def _read_evaluations(run: Path) -> Chart:
    """Returns the chart of the held-out accuracy of all evaluations of a run."""
    evaluations = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((run / "eval").glob("step-*.json"))]
    points = [(e["setting"]["step"], e["accuracy"]) for e in evaluations]
    bars = [(e["setting"]["step"], e["low"], e["high"]) for e in evaluations]
    return Chart(title="held-out accuracy", points=points, bars=bars)


def draw_page(charts: Sequence[Chart], title: str) -> str:
    """Returns the SVG text of all charts under a title."""
    rows = -(-len(charts) // COLUMNS)
    # 30 pixels above the charts are for the title.
    size = COLUMNS * WIDTH, rows * HEIGHT + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}"',
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>',
        f'<text x="10" y="20" font-size="14" fill="{INK}">{escape(title)}</text>',
    ]
    for i, chart in enumerate(charts):
        x, y = (i % COLUMNS) * WIDTH, (i // COLUMNS) * HEIGHT + 30
        parts.append(f'<g transform="translate({x},{y})">{_draw_chart(chart)}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _draw_chart(chart: Chart) -> str:
    """Returns the SVG elements of one chart, whose upper left corner is at (0, 0)."""
    xs = [x for x, _ in chart.points]
    ys = [y for _, y in chart.points] + [v for _, low, high in chart.bars for v in (low, high)]
    left = min(xs)
    right = max(max(xs), left + 1)
    low = min(ys)
    high = max(ys)
    # One value, or equal ones, would make a range of 0.
    high += (high == low) * (abs(high) or 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        """Returns the pixel position of a step and a value."""
        across = (x - left) / (right - left)
        up = (y - low) / (high - low)
        return MARGIN + across * (WIDTH - MARGIN - 14), HEIGHT - 26 - up * (HEIGHT - 60)

    lines = [f'<text x="{MARGIN}" y="16" fill="{INK}" font-size="12">{escape(chart.title)}</text>']
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        _, y = place(left, value)
        lines.append(f'<line x1="{MARGIN}" x2="{WIDTH - 14}" y1="{y:.1f}" y2="{y:.1f}" stroke="{FAINT}"/>')
        lines.append(f'<text x="{MARGIN - 4}" y="{y + 4:.1f}" text-anchor="end" fill="{INK}">{value:.3g}</text>')
    for x, anchor in ((left, "start"), (right, "end")):
        at, _ = place(x, low)
        lines.append(f'<text x="{at:.1f}" y="{HEIGHT - 10}" text-anchor="{anchor}" fill="{INK}">{x:g}</text>')
    for x, bottom, top in chart.bars:
        (at, a), (_, b) = place(x, bottom), place(x, top)
        style = f'stroke="{LINE}" stroke-width="3" opacity="0.4"'
        lines.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{a:.1f}" y2="{b:.1f}" {style}/>')
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in chart.points))
    lines.append(f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.5"/>')
    return "".join(lines)


def main() -> None:
    """Reads a run and writes its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--metrics", nargs="+", default=list(METRICS))
    parser.add_argument("--title", default="")
    a = parser.parse_args()
    a.out.write_text(draw_page(read_charts(a.run, a.metrics), a.title or a.run.name), encoding="utf-8")


if __name__ == "__main__":
    main()
