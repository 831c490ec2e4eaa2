"""The pieces of the live view."""

from __future__ import annotations

import math

from rich import box
from rich.cells import cell_len
from rich.console import ConsoleRenderable, Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from cohort.evaluation.records import Evaluation
from cohort.logs.curve import bounds, braille, place
from cohort.logs.escape import one_line, visible
from cohort.logs.numbers import compact, duration, stage_shares, tokens_per_second
from cohort.logs.view import Header, Showcase
from cohort.run.store.records import Curve

ACCENT, CALM, GOOD, BAD = "cyan", "bright_black", "green", "red"
_STAGES = ("cyan", "magenta", "yellow", "blue", "green", "bright_black")
_NUMBERS = (
    ("length", "length/mean"),
    ("cut at limit", "finish/length"),
    ("dead groups", "groups/dead"),
    ("entropy", "entropy"),
    ("perplexity", "perplexity"),
    ("grad norm", "grad_norm"),
    ("learning rate", "lr"),
    ("sampler gap", "sampler_gap/max"),
)
_PERCENT = {"finish/length", "groups/dead"}


def title(header: Header, phase: str) -> ConsoleRenderable:
    """Who, on what, and what it is doing."""
    names = [header.recipe, header.model, header.task, header.algo, header.batch]
    left = Text(end="")
    left.append(" cohort ", style=f"bold black on {ACCENT}")
    left.append("  " + " · ".join(dict.fromkeys(one_line(n, 40) for n in names if n)))
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, Text(one_line(phase, 20), style=f"italic {CALM}"))
    return grid


def progress(step: int, num_steps: int, elapsed: float, eta: float) -> ConsoleRenderable:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    bar = ProgressBar(total=max(1, num_steps), completed=step, complete_style=ACCENT, finished_style=GOOD)
    left = Text.assemble(("step ", CALM), (str(step), "bold"), (f"/{num_steps}", CALM))
    right = Text.assemble(duration(elapsed), ("  eta ", CALM), duration(eta))
    grid.add_row(left, bar, right)
    return grid


def middle(left: ConsoleRenderable, right: ConsoleRenderable) -> ConsoleRenderable:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(width=33)
    grid.add_row(left, right)
    return grid


def curve(
    header: Header, values: dict[int, float], evaluations: list[Evaluation], width: int, height: int
) -> ConsoleRenderable:
    """The curve's value of every step so far, and a dot for every held-out evaluation, over the whole run."""
    points = [(float(step), value) for step, value in sorted(values.items())]
    dots = [(float(e.step), e.accuracy) for e in evaluations]
    x, y = (0.0, float(max(1, header.num_steps))), bounds([value for _, value in points + dots])
    lines = [list(line) for line in braille(points, width, height, x, y)]
    marks = {(height - 1 - place(v, y, height), place(s, x, width)) for s, v in dots if math.isfinite(v)}
    text = Text(no_wrap=True)
    for row, line in enumerate(lines):
        label = y[1] if row == 0 else y[0] if row == height - 1 else None
        text.append(f"{'' if label is None else compact(label):>7} ", style=CALM)
        text.append("│" if label is None else "┤", style=CALM)
        for column, cell in enumerate(line):
            mark = (row, column) in marks
            # An empty braille cell shows faint dots in some fonts.
            text.append("●" if mark else " " if cell == "\u2800" else cell, style=f"bold {GOOD}" if mark else ACCENT)
        text.append("\n" if row < height - 1 else "")
    caption = Text.assemble(("━ ", ACCENT), (f"{header.curve.label}  ", CALM))
    if header.evaluates:
        caption.append("● ", style=GOOD).append("held-out accuracy", style=CALM)
    return Panel(Group(text, caption), box=box.ROUNDED, border_style=CALM, padding=(0, 1))


def numbers(
    curve: Curve, metrics: dict[str, float], values: dict[int, float], evaluations: list[Evaluation], height: int
) -> ConsoleRenderable:
    """The figures of the last step; the most telling first, since a low terminal cuts the others."""
    rows: list[tuple[str, Text]] = []
    if values:
        rows.append((curve.label, _trend(curve, values)))
    if evaluations:
        first, last = evaluations[0].accuracy, evaluations[-1].accuracy
        shown = f"{first:.2f} → {last:.2f}" if len(evaluations) > 1 else f"{last:.2f}"
        rows.append(("held-out", Text(shown, style=f"bold {GOOD}")))
    if speed := tokens_per_second(metrics):
        rows.append(("tokens/s", Text(speed, style="bold")))
    for label, name in _NUMBERS:
        if name in metrics:
            value = metrics[name]
            rows.append((label, Text(f"{value:.0%}" if name in _PERCENT else compact(value))))
    grid = Table.grid(expand=True)
    grid.add_column(style=CALM, no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    for label, text in rows[:height]:
        grid.add_row(label, text)
    for _ in range(height - len(rows)):
        grid.add_row("", "")
    return Panel(grid, box=box.ROUNDED, border_style=CALM, padding=(0, 1))


def _trend(curve: Curve, values: dict[int, float]) -> Text:
    """The last value and how it moved over the last ten steps."""
    series = [values[step] for step in sorted(values)]
    change = series[-1] - series[max(0, len(series) - 11)]
    arrow = "▲" if change > 0 else "▼" if change < 0 else ""
    style = GOOD if (change > 0) == curve.rising else BAD
    text = Text(f"{series[-1]:.3f}", style="bold")
    if arrow:
        text.append(f" {arrow}{abs(change):.2f}", style=style)
    return text


def stages(metrics: dict[str, float], width: int) -> ConsoleRenderable:
    """Where the last step's time went, as one bar with its legend."""
    shares = stage_shares(metrics)
    if not shares:
        return Text("")
    total = max(10, width - 2)
    bar, legend = Text(" ", no_wrap=True), Text(" ", no_wrap=True, overflow="ellipsis")
    drawn, reached = 0, 0.0
    for index, (name, share) in enumerate(shares.items()):
        style = CALM if name == "other" else _STAGES[min(index, len(_STAGES) - 1)]
        reached += share
        upto = min(total, round(reached * total))
        bar.append("━" * (upto - drawn), style=style)
        drawn = upto
        legend.append("■ ", style=style)
        legend.append(f"{one_line(name, 20)} {share:.0%}   ", style=CALM)
    legend.append(f"{metrics.get('time/step', math.nan):.2f} s a step", style="default")
    return Group(bar, legend)


def sample(showcase: Showcase, width: int, height: int) -> ConsoleRenderable:
    """The last interesting sample, in at most `height` lines inside the frame."""
    reward = "" if showcase.reward is None else f"reward {compact(showcase.reward)}"
    good = showcase.reward is not None and showcase.reward > 0
    head = Text.assemble(("sample of step ", CALM), str(showcase.step))
    if reward:
        head.append("  " + reward, style=f"bold {GOOD if good else BAD}")
    if showcase.note:
        head.append("  " + one_line(showcase.note, 60), style=CALM)
    inside = max(8, width - 4)
    question = _clip(visible(showcase.prompt, 1000), inside, max(1, height // 3), CALM)
    answer = _clip(visible(showcase.completion, 4000), inside, max(1, height - height // 3 - 1), "default")
    body = Group(question, Rule(style=CALM, characters="╌"), answer)
    return Panel(body, title=head, title_align="left", box=box.ROUNDED, border_style=CALM, padding=(0, 1))


def events(items: list[tuple[int, str, str]]) -> ConsoleRenderable:
    text = Text(no_wrap=True, overflow="ellipsis")
    for index, (step, kind, what) in enumerate(items):
        style = {"checkpoint": CALM, "run": CALM}.get(kind, "yellow")
        text.append("\n" if index else "")
        text.append(f" {step:>5} ", style=CALM)
        text.append(f"{one_line(kind, 20)} ", style=style)
        text.append(one_line(what, 300), style="default")
    return text


def _clip(text: str, width: int, num_lines: int, style: str) -> Text:
    """The first lines of a text, folded at the width; the cut is marked."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines.extend(_fold(line, width))
        if len(lines) > num_lines:
            lines = lines[:num_lines]
            lines[-1] = _fold(lines[-1], width - 2)[0] + " …"
            break
    return Text("\n".join(lines), style=style, no_wrap=True, overflow="crop")


def _fold(line: str, width: int) -> list[str]:
    """A line cut every `width` cells (wide characters take two)."""
    folded, current, used = [], "", 0
    for c in line:
        size = cell_len(c)
        if used + size > width:
            folded.append(current)
            current, used = "", 0
        current += c
        used += size
    return [*folded, current]
