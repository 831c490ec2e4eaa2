"""The picture of runs: which metrics it shows and in which units, and the file that it is written to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cohort.config.names import get_current_metric_name
from cohort.config.schema import RunConfig
from cohort.errors import ConfigError, RunError, suggest_name
from cohort.evaluation.records import ACCURACY, REWARD
from cohort.logs.escape import escape_line
from cohort.logs.legend import STEP_LINE
from cohort.plot.chart import WIDTH, Chart
from cohort.plot.endings import explain_endings
from cohort.plot.labels import describe_run
from cohort.plot.page import Page, draw_page
from cohort.plot.series import (
    EVALUATIONS,
    CurveOptions,
    Point,
    RunSeries,
    Series,
    choose_window,
    list_metrics,
    read_series,
    select_series,
)
from cohort.plot.svg import MARK, estimate_width
from cohort.system.disk import write_atomically

FILE = "curves.svg"
"""The name of the picture beside run.md."""

ALL = "all"
# What is shown where nothing is chosen: of runs with rewards, and of others.
_RL_METRICS = (ACCURACY, REWARD, "reward/mean", "length/mean", "entropy", "grad_norm", "sampler_gap/mean", "kl/ref")
_SFT_METRICS = (
    *(ACCURACY, REWARD, "loss", "eval/loss", "reward/margin", "eval/reward/margin", "reward/accuracy"),
    *("reward/chosen", "reward/rejected", "perplexity", "grad_norm", "lr"),
)
_TITLES = {
    ACCURACY: "held-out accuracy",
    REWARD: "held-out reward",
    "eval/loss": "held-out loss",
    "eval/reward/margin": "held-out margin",
}
# Meanings of metrics that are not in the line of a step.
_MEANINGS = {
    ACCURACY: "share of held-out problems that are solved",
    REWARD: "mean reward of answers to held-out problems",
    "eval/mean_tokens": "mean tokens per answer to a held-out problem",
    "sampler_gap/mean": "mean difference of sampler's and learner's log-probs; tiny is right",
    "kl/ref": "KL to the reference policy, nats per token",
    "eval/loss": "loss on the held-out examples",
    "reward/margin": "implicit reward of better answers minus that of worse ones",
    "eval/reward/margin": "reward/margin of the held-out pairs",
    "reward/chosen": "mean implicit reward of better answers",
    "reward/rejected": "mean implicit reward of worse answers",
    "reward/accuracy": "share of pairs whose better answer has the higher reward",
    "finish/length": "share of samples that were cut at the token limit",
    "time/step": "seconds per step",
    "time/tokens_per_s": "tokens sampled, or in the loss of sft and dpo, per second",
}
_ALIASES = {label: metric for metric, (label, _) in STEP_LINE.items()} | {"accuracy": ACCURACY, "kl": "kl/ref"}
# Units of time: up to how many seconds each is used, seconds of one, and its name.
_TIMES = ((180.0, 1.0, "seconds"), (3 * 3600.0, 60.0, "minutes"), (float("inf"), 3600.0, "hours"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureOptions:
    """What a picture shows."""

    metrics: tuple[str, ...] = ()  # () = the main ones that have values
    log: tuple[str, ...] = ()  # metrics with a logarithmic axis; ("all",) = all
    curves: CurveOptions = field(default_factory=CurveOptions)
    title: str = ""


def find_metric(word: str, known: Sequence[str]) -> str:
    """Returns the name of the metric that a word means: a name, an old name, or a label of a step's line.

    Raises ConfigError if no run has it.
    """
    for name in (word, get_current_metric_name(word), _ALIASES.get(word, "")):
        if name in known:
            return name
    similar = suggest_name(word, [*known, *(label for label, metric in _ALIASES.items() if metric in known)])
    near = similar if similar.startswith(" Did") else ""
    raise ConfigError(f'no run has the metric "{word}".{near} --metrics list shows all that there are.')


def choose_metrics(runs: Sequence[RunSeries], words: Sequence[str]) -> list[str]:
    """Returns the metrics to show: those that `words` mean or, without words, the main ones that have values.

    Raises ConfigError for an unknown one, RunError if no run has any values.
    """
    known = list_metrics(runs)
    if not known:
        some = "the run has" if len(runs) == 1 else "the runs have"
        raise RunError(
            f"{some} no metrics yet. Wait until a first step or evaluation is done, then repeat the command."
        )
    if words:
        return list(dict.fromkeys(find_metric(word, known) for word in words))
    has_rewards = any("reward/mean" in run.values for run in runs)
    has_others = not all("reward/mean" in run.values for run in runs if run.values)
    wanted = [*(_RL_METRICS if has_rewards else ()), *(_SFT_METRICS if has_others else ())]
    return [name for name in dict.fromkeys(wanted) if name in known] or known[:6]


def make_charts(runs: Sequence[RunSeries], options: PictureOptions) -> list[Chart]:
    """Returns the charts of a picture, one per metric.

    Raises ConfigError for an unknown metric, RunError if there are no values to draw.
    """
    metrics = choose_metrics(runs, options.metrics)
    known = list_metrics(runs)
    log = set(metrics) if options.log == (ALL,) else {find_metric(word, known) for word in options.log}
    if unused := [name for name in log if name not in metrics]:
        raise ConfigError(f"--log names {unused[0]}, which the picture does not show; add it to --metrics.")
    curves = replace(options.curves, smooth=choose_window(runs, options.curves))
    rows = {name: [select_series(run, name, curves, name in log) for run in runs] for name in metrics}
    if not any(series.points for row in rows.values() for series in row):
        raise RunError("no run has values of these metrics in these steps. Give other --steps or --metrics.")
    label = _convert_times(rows) if options.curves.x == "time" else options.curves.x
    places = [p.x for row in rows.values() for series in row for p in series.points]
    return [
        Chart(
            title=_TITLES.get(name, name),
            meaning=_explain_for_runs(name, runs),
            x_label=label,
            x_range=(min(places), max(places)),
            series=row,
            log=name in log,
            is_share=name == ACCURACY,
            bars=name.startswith(EVALUATIONS),
        )
        for name, row in rows.items()
        if any(series.points for series in row)
    ]


def _convert_times(rows: dict[str, list[Series]]) -> str:
    """Converts the seconds of all series, in place, to a unit that fits the longest. Returns the label of the axis."""
    longest = max((p.x for row in rows.values() for s in row for p in s.points), default=0.0)
    _, unit, name = next(entry for entry in _TIMES if longest <= entry[0])

    def convert(points: Sequence[Point]) -> tuple[Point, ...]:
        return tuple(replace(p, x=p.x / unit) for p in points)

    for metric, row in rows.items():
        rows[metric] = [replace(s, points=convert(s.points), smooth=convert(s.smooth)) for s in row]
    return f"{name} of training steps"


def explain_metric(name: str, width: float = WIDTH - 12) -> str:
    """Returns what a metric means: as many clauses as fit into `width` pixels; "" if that is not known."""
    meaning = _MEANINGS.get(name) or STEP_LINE.get(name, ("", ""))[1]
    ends = [match.start() for match in re.finditer(r"[;:]", meaning)] + [len(meaning)]
    fitting = [end for end in ends if estimate_width(meaning[:end], 10) <= width]
    return meaning[: max(fitting, default=ends[0])]


def _explain_for_runs(name: str, runs: Sequence[RunSeries]) -> str:
    """Returns what a metric means in these runs: what the bars of an evaluation are, and which loss it is."""
    has_intervals = any(run.values.get(f"{name}_low") for run in runs)
    if name == ACCURACY and has_intervals:
        if any(run.ranges for run in runs):
            return "share solved; bars of single runs: 95% intervals"
        # Only runs on pairs of answers have a margin.
        is_of_pairs = all("reward/margin" in run.values for run in runs)
        meaning = "share of held-out pairs ranked right" if is_of_pairs else explain_metric(ACCURACY)
        return f"{meaning}; 95% intervals"
    if name == REWARD and has_intervals:
        return f"{explain_metric(REWARD)}; 95% intervals"
    if name == "loss" and not any("reward/mean" in run.values for run in runs):
        return "loss on the given answers"
    return explain_metric(name)


def draw_runs(runs: Sequence[RunSeries], options: PictureOptions) -> str:
    """Returns the picture of runs as SVG. Raises what `make_charts` raises."""
    charts = make_charts(runs, options)
    window = choose_window(runs, options.curves)
    notes = []
    if any(run.ranges for run in runs):
        notes.append("curves: the mean over seeds; bands and bars: from the lowest seed to the highest")
    if window > 1:
        notes.append(f"thick: mean over {window} steps; thin: every step")
    if any(point.after_gap for chart in charts for series in chart.series for point in series.points):
        notes.append("at a gap of an evaluation its grader has changed, so both sides cannot be compared")
    labels = [run.label for run in runs]
    page = Page(
        title=options.title,
        labels=labels,
        charts=charts,
        note="; ".join(notes),
        footnotes=explain_ends(runs, options),
    )
    return draw_page(page)


def explain_ends(runs: Sequence[RunSeries], options: PictureOptions) -> list[str]:
    """Returns notes about curves of a picture that end before their run does."""
    return explain_endings(runs, choose_metrics(runs, options.metrics), options.curves)


def is_our_picture(path: Path) -> bool:
    """Returns whether a file is a picture that was made here, and so may be replaced."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            first = file.read(400)
    except OSError:
        return False
    return first.startswith("<svg") and MARK in first.partition("\n")[0]


def write_card_picture(run: Path, config: RunConfig) -> tuple[str, str]:
    """Draws a run and writes the picture beside its card. Returns the name of the file, and why it could not be made.

    One of them is "", or both for a run without metrics. A run must not fail because of its picture, whatever goes
    wrong.
    """
    try:
        series = read_series(run)
        if not series.values:
            return "", ""
        write_atomically(run / FILE, draw_runs([series], PictureOptions(title=describe_run(config))))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return "", f"{FILE} was not drawn ({escape_line(reason, 300)}); the run is complete without it"
    return FILE, ""
