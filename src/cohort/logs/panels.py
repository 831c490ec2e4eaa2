"""The panels that the live view is composed of."""

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
from cohort.logs.curve import draw_braille, find_bounds, find_cell
from cohort.logs.escape import escape_line, escape_text
from cohort.logs.legend import list_task_rewards
from cohort.logs.numbers import compute_stage_shares, format_compact, format_duration, format_tokens_per_second
from cohort.logs.view import Header, Showcase
from cohort.logs.wrapping import wrap_words
from cohort.run.store.records import Curve

ACCENT = "cyan"
CALM = "bright_black"
GOOD = "green"
BAD = "red"
# Colours of the stages, largest stage first; the last one is for all further stages.
_STAGES = ("cyan", "magenta", "yellow", "blue", "green", "bright_black")
# Label and metric of the figures beside the curve, most important first.
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
_PERCENT = {"finish/length", "groups/dead"}  # shares, shown in percent


def draw_title(header: Header, phase: str) -> ConsoleRenderable:
    """Returns the top line: recipe, model, task, algorithm and batch on the left, the current phase on the right.

    Names that are equal are shown once.
    """
    names = [header.recipe, header.model, header.task, header.algo, header.batch]
    # Names that are equal, for instance of recipe and task, are shown once.
    left = Text(end="")
    left.append(" cohort ", style=f"bold black on {ACCENT}")
    left.append("  " + " · ".join(dict.fromkeys(escape_line(n, 40) for n in names if n)))
    # The padding keeps the phase apart from names that fill the line.
    grid = Table.grid(expand=True, padding=(0, 2))
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, Text(escape_line(phase, 20), style=f"italic {CALM}"))
    return grid


def draw_progress(step: int, num_steps: int, elapsed: float, eta: float) -> ConsoleRenderable:
    """Returns a progress bar with the step on its left, and on its right the elapsed time and the remaining `eta`.

    Both are in seconds; an `eta` of NaN = not known.
    """
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    bar = ProgressBar(total=max(1, num_steps), completed=step, complete_style=ACCENT, finished_style=GOOD)
    left = Text.assemble(("step ", CALM), (str(step), "bold"), (f"/{num_steps}", CALM))
    right = Text.assemble(format_duration(elapsed), ("  eta ", CALM), format_duration(eta))
    grid.add_row(left, bar, right)
    return grid


def place_side_by_side(left: ConsoleRenderable, right: ConsoleRenderable) -> ConsoleRenderable:
    """Returns a grid with two panels side by side. The right one is 33 columns wide, the left one takes the rest."""
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(width=33)
    grid.add_row(left, right)
    return grid


def draw_curve(
    header: Header, values: dict[int, float], evaluations: list[Evaluation], width: int, height: int
) -> ConsoleRenderable:
    """Returns a panel with the curve of `values` (by step) and a dot per held-out evaluation.

    The x axis covers the whole run, the y axis all finite values. `width` and `height` are those of the drawing area in
    characters; axis labels, a caption and the border come on top.
    """
    points = [(float(step), value) for step, value in sorted(values.items())]
    dots = [(float(e.step), e.value) for e in evaluations]
    x, y = (0.0, float(max(1, header.num_steps))), find_bounds([value for _, value in points + dots])
    lines = [list(line) for line in draw_braille(points, width, height, x, y)]
    marks = {(height - 1 - find_cell(v, y, height), find_cell(s, x, width)) for s, v in dots if math.isfinite(v)}
    text = Text(no_wrap=True)
    for row, line in enumerate(lines):
        # The axis is labelled at its top and bottom only.
        label = y[1] if row == 0 else y[0] if row == height - 1 else None
        text.append(f"{'' if label is None else format_compact(label):>7} ", style=CALM)
        text.append("│" if label is None else "┤", style=CALM)
        for column, cell in enumerate(line):
            is_dot = (row, column) in marks
            # An empty braille character shows faint dots in some fonts, so a space takes its place.
            shown = "●" if is_dot else " " if cell == "\u2800" else cell
            text.append(shown, style=f"bold {GOOD}" if is_dot else ACCENT)
        text.append("\n" if row < height - 1 else "")
    caption = Text.assemble(("━ ", ACCENT), (f"{header.curve.label}  ", CALM))
    if header.has_evaluation:
        caption.append("● ", style=GOOD).append(header.measured, style=CALM)
    return Panel(Group(text, caption), box=box.ROUNDED, border_style=CALM, padding=(0, 1))


def draw_numbers(
    curve: Curve, metrics: dict[str, float], values: dict[int, float], evaluations: list[Evaluation], height: int
) -> ConsoleRenderable:
    """Returns a panel with figures of the last step, one per line, in exactly `height` lines inside the border.

    `metrics` are those of the step, `values` those of the curve by step. The most important figures come first; what
    exceeds `height` is left out.
    """
    rows: list[tuple[str, Text]] = []
    if values:
        rows.append((curve.label, _draw_trend(curve, values)))
    if evaluations:
        a, b = evaluations[0], evaluations[-1]
        is_comparable = len(evaluations) > 1 and a.setting.grader == b.setting.grader
        shown = f"{a.value:.2f} → {b.value:.2f}" if is_comparable else f"{b.value:.2f}"
        rows.append(("held-out", Text(shown, style=f"bold {GOOD}")))
    rows += [(label, Text(format_compact(reward))) for label, reward in list_task_rewards(metrics)]
    if speed := format_tokens_per_second(metrics):
        rows.append(("tokens/s", Text(speed, style="bold")))
    for label, name in _NUMBERS:
        if name in metrics:
            value = metrics[name]
            rows.append((label, Text(f"{value:.0%}" if name in _PERCENT else format_compact(value))))
    grid = Table.grid(expand=True)
    grid.add_column(style=CALM, no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    for label, text in rows[:height]:
        grid.add_row(label, text)
    # Empty lines keep the panel as high as the curve beside it.
    for _ in range(height - len(rows)):
        grid.add_row("", "")
    return Panel(grid, box=box.ROUNDED, border_style=CALM, padding=(0, 1))


def _draw_trend(curve: Curve, values: dict[int, float]) -> Text:
    """Returns the last value of the curve with an arrow and its change over the last ten values.

    The arrow is green if the change is for the better, else red. Without a change there is only the value. `values` are
    by step; there must be at least one.
    """
    series = [values[step] for step in sorted(values)]
    change = series[-1] - series[max(0, len(series) - 11)]
    arrow = "▲" if change > 0 else "▼" if change < 0 else ""
    style = GOOD if (change > 0) == curve.rising else BAD
    text = Text(f"{series[-1]:.3f}", style="bold")
    if arrow:
        text.append(f" {arrow}{abs(change):.2f}", style=style)
    return text


def draw_stages(metrics: dict[str, float], width: int) -> ConsoleRenderable:
    """Returns a bar that shows which share of the last step's time each stage took, with a legend below.

    `width` is that of the terminal in characters. Returns an empty text if the times are not known.
    """
    shares = compute_stage_shares(metrics)
    if not shares:
        return Text("")
    total = max(10, width - 2)
    bar, legend = Text(" ", no_wrap=True), Text(" ", no_wrap=True, overflow="ellipsis")
    # Each stage is drawn up to the rounded sum of shares, so that rounding errors do not add up.
    drawn = 0
    reached = 0.0
    for index, (name, share) in enumerate(shares.items()):
        style = CALM if name == "other" else _STAGES[min(index, len(_STAGES) - 1)]
        reached += share
        end = min(total, round(reached * total))
        bar.append("━" * (end - drawn), style=style)
        drawn = end
        legend.append("■ ", style=style)
        legend.append(f"{escape_line(name, 20)} {share:.0%}   ", style=CALM)
    legend.append(f"{metrics.get('time/step', math.nan):.2f} s per step", style="default")
    return Group(bar, legend)


def draw_sample(showcase: Showcase, width: int, height: int) -> ConsoleRenderable:
    """Returns a panel with a sample: prompt and completion, escaped; reward and note (why it ended) in its title.

    Long texts are cut, so that at most `height` lines, or 3 if that is more, are inside the border. `width` is that of
    the panel.
    """
    reward = "" if showcase.reward is None else f"reward {format_compact(showcase.reward)}"
    is_good = showcase.reward is not None and showcase.reward > 0
    head = Text.assemble(("sample of step ", CALM), str(showcase.step))
    if reward:
        head.append("  " + reward, style=f"bold {GOOD if is_good else BAD}")
    if showcase.note:
        head.append("  " + escape_line(showcase.note, 60), style=CALM)
    # A third of the lines is for the prompt, one for the rule, the rest for the completion.
    inside = max(8, width - 4)
    question = _clip_text(escape_text(showcase.prompt, 1000), inside, max(1, height // 3), CALM)
    answer = _clip_text(escape_text(showcase.completion, 4000), inside, max(1, height - height // 3 - 1), "default")
    body = Group(question, Rule(style=CALM, characters="╌"), answer)
    return Panel(body, title=head, title_align="left", box=box.ROUNDED, border_style=CALM, padding=(0, 1))


def wrap_events(items: list[tuple[int, str, str]], width: int, most: int) -> list[Text]:
    """Returns the lines of the events, in the given order, broken between words. Further lines are indented.

    An event is (step, kind, text); both texts are escaped. `width` is that of the terminal, and `most` the number of
    lines for all of them, of which each gets an equal part, and one at least. What does not fit is cut.
    """
    lines: list[Text] = []
    for step, kind, what in items:
        style = {"checkpoint": CALM, "run": CALM}.get(kind, "yellow")
        lead = f"{escape_line(kind, 20)} "
        rows = wrap_words(f"{lead}{escape_line(what, 300)}", max(16, width - 7))
        share = max(1, most // len(items))
        if len(rows) > share:
            rows = [*rows[: share - 1], " ".join(rows[share - 1 :])]
        for number, row in enumerate(rows):
            line = Text(no_wrap=True, overflow="ellipsis")
            line.append(f" {step:>5} " if number == 0 else " " * 7, style=CALM)
            if number == 0 and row.startswith(lead):
                line.append(lead, style=style).append(row[len(lead) :], style="default")
            else:
                line.append(row, style="default")
            lines.append(line)
    return lines


def _clip_text(text: str, width: int, num_lines: int, style: str) -> Text:
    """Returns the first `num_lines` lines of a text after folding it at `width` terminal cells.

    An ellipsis at the end of the last line marks a cut. `style` is rich's name of colour and weight.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        lines.extend(_fold_line(line, width))
        if len(lines) > num_lines:
            lines = lines[:num_lines]
            lines[-1] = _fold_line(lines[-1], width - 2)[0] + " …"
            break
    return Text("\n".join(lines), style=style, no_wrap=True, overflow="crop")


def _fold_line(line: str, width: int) -> list[str]:
    """Returns a line as pieces of at most `width` terminal cells; an empty line as one empty piece.

    Wide characters take two cells. Breaks words anywhere.
    """
    folded = []
    current = ""
    used = 0
    for c in line:
        size = cell_len(c)
        if used + size > width:
            folded.append(current)
            current = ""
            used = 0
        current += c
        used += size
    return [*folded, current]
