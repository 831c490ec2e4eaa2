"""Curves of a run as an SVG picture: one small chart a metric, evaluations with their intervals.

    python scripts/curves.py runs/RUN --out curves.svg [--metrics reward/mean length/mean entropy] [--title TEXT]

Needs nothing but the standard library; reads the run's metrics.jsonl and eval/*.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

METRICS = ("reward/mean", "length/mean", "entropy", "grad_norm", "sampler_gap/mean")
WIDTH, HEIGHT, COLUMNS, MARGIN = 340, 200, 3, 54
INK, LINE, FAINT = "#333333", "#2a6fbb", "#dddddd"


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    points: list[tuple[float, float]]
    bars: list[tuple[float, float, float]]  # step, low, high


def read_charts(run: Path, metrics: Sequence[str]) -> list[Chart]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    charts = [_evaluations(run)]
    for name in metrics:
        points = [(row["step"], row["metrics"][name]) for row in rows if name in row["metrics"]]
        if points:
            charts.append(Chart(title=name, points=points, bars=[]))
    return [chart for chart in charts if chart.points]


def _evaluations(run: Path) -> Chart:
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((run / "eval").glob("step-*.json"))]
    points = [(e["setting"]["step"], e["accuracy"]) for e in found]
    bars = [(e["setting"]["step"], e["low"], e["high"]) for e in found]
    return Chart(title="held-out accuracy", points=points, bars=bars)


def draw(charts: Sequence[Chart], title: str) -> str:
    rows = -(-len(charts) // COLUMNS)
    size = COLUMNS * WIDTH, rows * HEIGHT + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}"',
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>',
        f'<text x="10" y="20" font-size="14" fill="{INK}">{escape(title)}</text>',
    ]
    for i, chart in enumerate(charts):
        x, y = (i % COLUMNS) * WIDTH, (i // COLUMNS) * HEIGHT + 30
        parts.append(f'<g transform="translate({x},{y})">{_chart(chart)}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _chart(chart: Chart) -> str:
    xs = [x for x, _ in chart.points]
    ys = [y for _, y in chart.points] + [v for _, low, high in chart.bars for v in (low, high)]
    left, right, low, high = min(xs), max(max(xs), min(xs) + 1), min(ys), max(ys)
    high += (high == low) * (abs(high) or 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - left) / (right - left), (y - low) / (high - low)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--metrics", nargs="+", default=list(METRICS))
    parser.add_argument("--title", default="")
    a = parser.parse_args()
    a.out.write_text(draw(read_charts(a.run, a.metrics), a.title or a.run.name), encoding="utf-8")


if __name__ == "__main__":
    main()
