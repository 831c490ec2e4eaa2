"""`cohort plot RUN [RUN ...] [--metrics a,b] [--out FILE.svg]`: draws the curves of runs, overlaid, as one picture."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cohort.cli.arguments import read_arguments
from cohort.cli.output import format_table
from cohort.config.section import at_least
from cohort.errors import CohortError, ConfigError, RunError
from cohort.logs.printing import print_note, print_result
from cohort.run.finding import find_run, is_run, list_runs
from cohort.system.disk import is_standard_output, write_atomically

if TYPE_CHECKING:
    from cohort.config.schema import RunConfig
    from cohort.plot.picture import PictureOptions
    from cohort.plot.series import RunSeries


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the picture shows, and where it goes."""

    metrics: str = ""
    """What to draw: names of metrics with commas between, such as reward,entropy. "list" prints all that the runs have.
    By default the main ones."""
    out: str = ""
    """The SVG file to write. By default curves.svg in the directory of a single run, in this folder for several. With
    it, nothing is printed but the name of the file, unless you add --text."""
    smooth: Annotated[int, at_least(0)] = 0
    """Draw the mean over so many steps, and every step thinly behind it. 1 = not smoothed. 0 = chosen for you: curves
    of up to 100 steps are not smoothed, longer ones over a fortieth of their steps."""
    log: str = ""
    """Metrics that get a logarithmic axis, with commas between; "all" = every one."""
    mean: bool = False
    """Draw runs that differ only in their seed as one curve: their mean, with a band from the lowest run to the highest
    at each step."""
    x: Literal["step", "samples", "tokens", "time"] = "step"
    """The horizontal axis: steps, samples or tokens so far, or the time that the steps took."""
    steps: str = ""
    """Only these steps, such as 100:500, 100: or :500."""
    title: str = ""
    """The title of the picture. By default what the run is, or what the runs have in common."""
    text: bool = False
    """Print all curves as text and write no file, unless --out names one."""
    json: bool = False
    """Print the series as one JSON object, for programs, and write no file, unless --out names one."""
    force: bool = False
    """Replace a file that `cohort plot` has not made."""


def run(args: list[str]) -> None:
    """Runs `cohort plot` with `args`, the words after it: writes the picture, or prints the curves.

    Raises CohortError for wrong flags, unknown metrics, and runs that cannot be read.
    """
    about = (
        "Draw the curves of one run or several, overlaid, as an SVG picture: one small chart per metric, and the "
        "held-out accuracy or reward with its 95% intervals. On a terminal the first charts are printed as text too. A "
        "folder of runs, such as that of a sweep, stands for all runs in it. Runs may still be training."
    )
    words, options = read_arguments("plot", ["RUN", "..."], about, Options(), args)
    if options.text and options.json:
        raise ConfigError("--text and --json exclude each other; remove one.")
    first, last = parse_steps(options.steps)
    paths = [path for word in words for path in find_runs(word)]
    out = choose_file(options, paths)
    # Imported here because they take longer: help and mistakes must not wait for that.
    from cohort.plot.picture import PictureOptions, draw_runs
    from cohort.plot.series import CurveOptions

    runs, title = read_runs(paths, options.mean)
    if options.metrics.strip() == "list":
        print_result(format_metrics(runs))
        return
    picture = PictureOptions(
        metrics=_split(options.metrics),
        log=_split(options.log),
        curves=CurveOptions(x=options.x, first=first, last=last, smooth=options.smooth),
        title=options.title or title,
    )
    if out is not None:
        _write(out, draw_runs(runs, picture))
    if options.json:
        print_result(format_json(runs, picture))
    elif options.text or (not options.out and sys.stdout.isatty()):
        print_result(format_curves(runs, picture, is_whole=options.text))
    if out is not None and not options.json and not is_standard_output(out):
        print_result(f"wrote {out}")


def find_runs(word: str) -> list[Path]:
    """Returns the directory of the run that a word means, or all runs in a folder of runs, such as that of a sweep."""
    path = find_run(word, or_sweep=True)
    # A run whose config is lost is a run still.
    is_one = is_run(path) or (path / "run.db").exists()
    return [path] if is_one else list_runs(path) or [path]


def parse_steps(text: str) -> tuple[int, int | None]:
    """Returns the first and the last step of a text such as "100:500"; None = to the end. "" means all steps.

    Raises ConfigError for anything else.

    >>> parse_steps("100:"), parse_steps(":5"), parse_steps("")
    ((100, None), (0, 5), (0, None))
    """
    match = re.fullmatch(r"([0-9]{0,12}):([0-9]{0,12})", text) if text else re.fullmatch("()()", "")
    if match is None:
        raise ConfigError(f'--steps is "{text}"; write two steps with a colon between, such as 100:500, 100: or :500.')
    first = int(match[1] or 0)
    last = int(match[2]) if match[2] else None
    if last is not None and last < first:
        raise ConfigError(f"--steps {text} ends before it begins; write --steps {last}:{first}.")
    return first, last


def choose_file(options: Options, runs: Sequence[Path]) -> Path | None:
    """Returns the file to write; None = none. Raises ConfigError for one that must not be written."""
    if not options.out and (options.text or options.json or options.metrics.strip() == "list"):
        return None
    from cohort.plot.picture import FILE, is_our_picture

    out = Path(options.out) if options.out else runs[0] / FILE if len(runs) == 1 else Path(FILE)
    if not options.out and out.parent.is_dir() and not os.access(out.parent, os.W_OK):
        raise ConfigError(f"{out.parent} cannot be written, so name a file elsewhere: --out {FILE}.")
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file in it, such as {out / FILE}.")
    if out.exists() and not out.is_file():
        return out  # such as /dev/stdout
    if out.suffix.lower() != ".svg":
        raise ConfigError(
            f"--out {out} does not end in .svg, the only format. Write --out {out.with_suffix('.svg')}; a browser "
            "shows it and prints it as PDF."
        )
    if out.exists() and not options.force and not is_our_picture(out):
        raise ConfigError(
            f"{out} exists and was not made by cohort plot; name another file with --out, or add --force."
        )
    return out


def read_runs(paths: Sequence[Path], mean: bool = False) -> tuple[list[RunSeries], str]:
    """Returns the series of all runs that can be read, with labels, and a title. The others are named on stderr.

    With `mean`, those that differ only in their seed are one.

    Raises RunError if there is no such run, ConfigError if one is named twice, and the first problem if none is left.
    """
    from cohort.plot.labels import describe_run, describe_runs, label_runs, read_config
    from cohort.plot.series import read_series
    from cohort.run.directory import RunDirectory

    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("a run is named twice; name each run once.")
    for path in paths:
        # A word that is no run is a mistake; a run whose files are damaged is not the user's.
        if not (path / "run.db").exists():
            RunDirectory.open(path)
    runs, kept, problems = [], [], []
    configs = [read_config(path) for path in paths]
    labels = label_runs(paths, configs)
    for path, label, config in zip(paths, labels, configs, strict=True):
        try:
            runs.append(read_series(path, label))
            kept.append(config)
        except CohortError as error:
            problems.append(error)
    if not runs:
        raise problems[0]
    for problem in problems:
        print_note(f"left out: {problem}")
    if mean:
        return _average(runs, kept), describe_runs(kept)
    if len(runs) > 1:
        return runs, describe_runs(kept)
    return runs, describe_run(kept[0]) if kept[0] is not None else runs[0].label


def _average(runs: Sequence[RunSeries], configs: Sequence[RunConfig | None]) -> list[RunSeries]:
    """Returns one series per group of runs that differ only in their seed. Raises ConfigError if no two do."""
    from cohort.plot.labels import label_means
    from cohort.plot.means import average_runs, group_by_settings

    groups = group_by_settings(configs)
    if len(groups) == len(runs):
        raise ConfigError("--mean has no effect: no two of these runs differ only in their seed. Remove it.")
    labels = label_means([run.label for run in runs], groups, configs)
    return [average_runs([runs[i] for i in group], label) for group, label in zip(groups, labels, strict=True)]


def format_metrics(runs: Sequence[RunSeries]) -> str:
    """Returns a table of all metrics of the runs: name, number of values, first and last value, meaning."""
    from cohort.evaluation.records import ACCURACY
    from cohort.plot.picture import explain_metric
    from cohort.plot.scale import format_share, format_value
    from cohort.plot.series import list_metrics

    rows = []
    for name in list_metrics(runs):
        series = [run.values[name] for run in runs if run.values.get(name)]
        values = [value for one in series for _, value in sorted(one.items())]
        first, last = map(format_share if name == ACCURACY else format_value, (values[0], values[-1]))
        rows.append([name, str(len(values)), first, last, explain_metric(name)])
    return format_table(["metric", "values", "first", "last", "meaning"], rows)


def format_curves(runs: Sequence[RunSeries], options: PictureOptions, *, is_whole: bool) -> str:
    """Returns the curves as text of the terminal's width: all of them or, unless `is_whole`, what it shows at once."""
    from cohort.logs.console import make_console
    from cohort.plot.picture import explain_ends, make_charts
    from cohort.plot.text import draw_on_screen, draw_text

    console = make_console()
    charts, notes = make_charts(runs, options), explain_ends(runs, options)
    if is_whole:
        return draw_text(charts, notes, console.width)
    # Below them stand the command's last line and the shell's prompt; above them, the command itself.
    return draw_on_screen(charts, notes, console.width, console.height - 3)


def format_json(runs: Sequence[RunSeries], options: PictureOptions) -> str:
    """Returns the series of all charts as JSON: title, axis, and per chart the points of every run.

    NaN and infinity become null.
    """
    from cohort.logs.jsonlines import replace_non_finite
    from cohort.plot.picture import make_charts

    charts = [
        {
            "metric": chart.title,
            "x": chart.x_label,
            "log": chart.log,
            "runs": [asdict(series) for series in chart.series],
        }
        for chart in make_charts(runs, options)
    ]
    return json.dumps(replace_non_finite({"title": options.title, "charts": charts}))


def _split(names: str) -> tuple[str, ...]:
    """Returns the names in a text, which are separated by commas."""
    return tuple(name.strip() for name in names.split(",") if name.strip())


def _write(out: Path, text: str) -> None:
    """Writes the picture. Raises RunError if that fails."""
    if not out.parent.is_dir():
        raise RunError(f"there is no folder {out.parent} for {out.name}; make it, or name another file with --out.")
    write_atomically(out, text)
