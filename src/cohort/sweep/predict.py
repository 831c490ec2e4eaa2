"""Predicts how long the runs of a sweep take: from earlier runs that did the same work, or from a short run now."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cohort.config.document import collect_written_settings, get_variant_name
from cohort.config.flags import format_setting
from cohort.config.schema import RunConfig
from cohort.errors import CohortError, RunError
from cohort.evaluation.records import HELD_OUT_METRICS
from cohort.run.directory import RunDirectory
from cohort.run.finding import list_runs
from cohort.run.store.reader import Reader
from cohort.sweep.plan import Plan, PlannedRun
from cohort.sweep.process import make_environment, read_last_line
from cohort.system.kernel import count_cores

START_SECONDS = 5.0  # of a run before its first evaluation, where nothing is measured
_MAX_EARLIER = 100  # newest runs that are looked at
_MAX_MEASURED = 4  # short runs that are made for one prediction
_SHORT_STEPS = 2  # of a run that is made to measure: the first is slower than all others
# Settings that change no step's amount of work, or only through what is learned.
_FREE = ("seed", "steps", "date", "recipe", "threads", "optim.", "eval.", "save.", "reward.")
# Settings that a run of two steps need not have, or cannot.
_NOT_SHORT = ("steps", "eval.every", "save.every", "optim.warmup")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeStats:
    """Measured seconds of a run."""

    step: float  # one step
    evaluation: float  # one evaluation
    start: float = START_SECONDS
    source: str  # where the numbers come from

    def predict_seconds(self, config: RunConfig) -> float:
        """Returns the seconds that a run with this config takes.

        >>> from cohort.recipes import RECIPES
        >>> TimeStats(step=2.0, evaluation=3.0, start=1.0, source="").predict_seconds(RECIPES["quickstart"]())
        67.0
        """
        return self.start + config.steps * self.step + count_evaluations(config) * self.evaluation


def count_evaluations(config: RunConfig) -> int:
    """Returns how often a run is evaluated: before the first step, after the last, and every `eval.every` steps."""
    if not config.is_evaluated:
        return 0
    every = config.eval.every
    return 2 + ((config.steps - 1) // every if every else 0)


def describe_work(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that decide how much work a step is, by full name, and the names of variants."""
    values = {name: value for name, value in collect_written_settings(config).items() if not name.startswith(_FREE)}
    variants = {field: get_variant_name(field, getattr(config, field)) for field in config.variants}
    return values | variants | {"kind": config.kind, "threads": config.threads or count_cores()}


def is_same_work(ours: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    """Returns whether a step of a recorded run is as much work as one of ours. Both are from `describe_work`.

    "auto" fits every value: a run records what it has chosen. A path fits its absolute form.
    """
    return ours.keys() == recorded.keys() and all(
        value in ("auto", recorded[name]) or (isinstance(value, str) and os.path.abspath(value) == recorded[name])
        for name, value in ours.items()
    )


def read_timing(path: Path, config: RunConfig) -> TimeStats | None:
    """Returns the times of the run in the directory `path`, whose config is `config`; None if it has too few steps.

    A step's time is the median without the first, which is slower. Raises RunError if run.db cannot be read.
    """
    with Reader(path / "run.db", once=True) as reader:
        steps = reader.read_series("time/step")
        ended = {row.step: row.time for row in reader.read_metrics(name="time/step")}
        evaluated = {row.step: row.time for name in HELD_OUT_METRICS for row in reader.read_metrics(name=name)}
    later = [seconds for step, seconds in steps.items() if step > 1]
    if not later:
        return None
    spent = [evaluated[step] - ended[step] for step in evaluated if step in ended]
    # A task without held-out rows is never evaluated, though its config could be.
    if not spent and evaluated:
        return None
    evaluation = statistics.median(spent) if spent else 0.0
    return TimeStats(step=statistics.median(later), evaluation=evaluation, source=f"the steps of {path}")


def find_earlier_timing(config: RunConfig, out: Path) -> TimeStats | None:
    """Returns the times of the newest run in the folder `out`, or in a sweep there, that did the same work; or None.

    The time of an evaluation is scaled to the number of problems and samples.
    """
    ours = describe_work(config)
    for path in sorted(list_runs(out), key=_find_age)[:_MAX_EARLIER]:
        try:
            recorded = RunDirectory.open(path).config
            timing = read_timing(path, recorded) if is_same_work(ours, describe_work(recorded)) else None
        # A run of another version, or a damaged one, is of no use here.
        except CohortError:
            continue
        if timing is not None:
            ours_asked, theirs_asked = _count_answers(config), _count_answers(recorded)
            factor = ours_asked / theirs_asked if ours_asked and theirs_asked else 1.0
            return replace(timing, evaluation=timing.evaluation * factor)
    return None


def _count_answers(config: RunConfig) -> int:
    """Returns the number of answers of an evaluation; 0 = not known, because it has all problems."""
    return config.eval.problems * config.eval.samples


def _find_age(run: Path) -> float:
    """Returns a number that is smaller the newer a run is."""
    try:
        return -(run / "run.db").stat().st_mtime
    except OSError:
        return 0.0


def measure_timing(plan: Plan, run: PlannedRun) -> TimeStats:
    """Makes a run of two steps with the settings of `run` in a temporary folder, and returns its times.

    Raises RunError with the last line of its error if it fails.
    """
    flags = [flag for flag in plan.make_flags(run.values, run.seed) if flag.name not in _NOT_SHORT]
    words = [word for f in flags for word in format_setting(f.name, f.values[0] if len(f.values) == 1 else f.values)]
    with tempfile.TemporaryDirectory(prefix="cohort-sweep-") as folder:
        log = Path(folder) / "log.txt"
        train = ["train", plan.recipe, *words, f"--steps={_SHORT_STEPS}", "--log=plain", f"--out={folder}/runs"]
        begin = time.monotonic()
        with open(log, "wb") as output:
            done = subprocess.run(
                [sys.executable, "-m", "cohort", *train],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=make_environment(),
                check=False,
            )
        seconds = time.monotonic() - begin
        found = list_runs(Path(folder) / "runs")
        timing = read_timing(found[0], RunDirectory.open(found[0]).config) if found and not done.returncode else None
        if timing is None:
            raise RunError(f"a run of {_SHORT_STEPS} steps failed, so no time can be predicted: {read_last_line(log)}")
    # Two evaluations: before the first step and after the last.
    rest = seconds - _SHORT_STEPS * timing.step - 2 * timing.evaluation
    return replace(timing, start=max(0.0, rest), source=f"a run of {_SHORT_STEPS} steps, made now")


def predict_times(
    plan: Plan, configs: Sequence[RunConfig], out: Path, tell: Callable[[str], None]
) -> list[tuple[float, str]]:
    """Returns the seconds that a run of each combination takes, and where the number comes from.

    `configs` are those of the combinations. `tell` is called with what is being measured. After a few measurements
    further combinations are taken to be like the mean of those.
    """
    known: list[tuple[dict[str, Any], TimeStats]] = []
    predicted: list[tuple[float, str]] = []
    num_measured = 0
    runs = {run.combination: run for run in reversed(plan.list_runs())}
    for index, config in enumerate(configs):
        work = describe_work(config)
        timing = next((timing for other, timing in known if other == work), None) or find_earlier_timing(config, out)
        if timing is None and num_measured == _MAX_MEASURED:
            predicted.append((statistics.mean(seconds for seconds, _ in predicted), "the mean of the others"))
            continue
        if timing is None:
            tell(f"measuring {runs[index].label or 'the recipe'}: a run of {_SHORT_STEPS} steps")
            timing = measure_timing(plan, runs[index])
            num_measured += 1
        known.append((work, timing))
        predicted.append((timing.predict_seconds(config), timing.source))
    return predicted


def add_up(seconds: Sequence[float], jobs: int) -> float:
    """Returns how long runs take together if `jobs` of them run at once, each begun as soon as one has ended.

    >>> add_up([3.0, 1.0, 1.0, 1.0], 2), add_up([3.0, 1.0], 1)
    (3.0, 4.0)
    """
    ends = [0.0] * jobs
    for one in seconds:
        first = min(range(jobs), key=ends.__getitem__)
        ends[first] += one
    return max(ends)
