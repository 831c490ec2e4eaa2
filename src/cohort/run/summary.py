"""The summary of a run: its settings, its newest metrics and its state, read without a lock and without foreign code.

A run may be under way, half written or damaged. Whatever is wrong with it becomes its state, never an error.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cohort.config.differences import SettingsDifference, find_differences, flatten_settings
from cohort.config.names import move_old_settings
from cohort.config.regular_yaml import read_regular_yaml
from cohort.config.section import MOST
from cohort.config.yaml_text import MAX_SIZE, read_yaml
from cohort.errors import CohortError, RunError
from cohort.run.activity import LockMonitor
from cohort.run.store.reader import Reader
from cohort.run.store.records import FINISHED, STOPPED, Curve, Overview
from cohort.run.swept import SWEEP_FILE, SweptSettings, adjust_differences, read_swept_settings

State = Literal["running", "running?", "done", "stopped", "crashed", "empty", "broken"]
STATES: tuple[State, ...] = ("running", "running?", "done", "stopped", "crashed", "empty", "broken")
"""running? = on another machine, where it cannot be known; empty = ended before its first step."""

NUM_POINTS = 32  # of the curve of a run; each takes 4 microseconds or more
# What the runs of each kind show as their curve.
_CURVES = {
    "rl": Curve(),
    "sft": Curve(label="loss", metric="loss", rising=False),
    "dpo": Curve(label="margin", metric="reward/margin", rising=True),
}
# How a user, a system that shuts down, or a sweep ends a run. All other stops are errors.
_ASKED_TO_STOP = tuple(f"{STOPPED} {cause}" for cause in ("SIG", "KeyboardInterrupt", "a rule", "its loop"))
_RUN_FILES = ("config.yaml", "run.db")  # a directory with one of them is a run, or what is left of one
_MADE_FIRST = frozenset(
    {"rollouts", "checkpoints", "eval", ".lock"}
)  # what the start of a run makes before these files


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """What is known of a run. A field of a run that is damaged has its default where it cannot be read."""

    name: str
    path: Path
    state: State
    note: str = ""  # why the run is in this state, in one line; "" = nothing to say
    kind: str = ""  # "rl" or "sft"; "" = not known, as all of the following texts
    recipe: str = ""
    model: str = ""
    step: int = 0  # newest one that is recorded
    num_steps: int = 0  # all steps of the run; 0 = not known
    started: float = math.nan  # seconds since 1970, UTC; NaN = not known
    updated: float = math.nan  # when it last recorded something
    eta: float = math.nan  # seconds until a running run ends; NaN = not known
    accuracy: float = math.nan  # newest held-out accuracy; NaN = none
    accuracy_step: int = 0  # of the newest evaluation
    eval_reward: float = math.nan  # newest held-out mean reward, of a task without an accuracy; NaN = none
    split: str = ""  # of the evaluations: "test" or "validation"
    best_accuracy: float = math.nan  # of the trained model; the accuracy of step 0 does not count
    best_eval_reward: float = math.nan  # likewise
    best_step: int = 0
    curve: Curve = field(default_factory=Curve)  # the metric in `values`
    values: Mapping[int, float] = field(default_factory=dict)  # of the curve by step, 32 at most, evenly spaced
    metrics: Mapping[str, float] = field(default_factory=dict)  # newest ones, of a step and of an evaluation
    settings: Mapping[str, Any] = field(default_factory=dict)  # by full name, such as optim.lr
    differences: SettingsDifference = field(default_factory=lambda: SettingsDifference(values={}, source=""))
    command: str = ""  # what the user typed
    sweep: SweptSettings | None = None  # None = the run is in no sweep

    @property
    def score(self) -> float:
        """The newest value of the curve, such as the mean reward; NaN = none."""
        return self.metrics.get(self.curve.metric, next(reversed([*self.values.values()]), math.nan))


def find_runs(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields (name, path) of the runs in a folder, and of those in the folders in it, in the order of names.

    The name is the path below `folder`; for a folder that is itself a run, its own name. What is left of a run whose
    start was interrupted counts. Folders that cannot be read are left out. Raises RunError if there is no such folder.
    """
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}. Name one that has runs, or start a run: cohort train quickstart.")
    if _is_run(folder):
        yield folder.resolve().name, folder
        return
    # A sweep may have empty folders that are no runs.
    is_sweep = (folder / SWEEP_FILE).exists()
    for name in _list_folders(folder):
        path = folder / name
        inner = [] if _is_run(path) else [other for other in _list_folders(path) if _is_run(path / other)]
        if inner:
            yield from ((f"{name}/{other}", path / other) for other in inner)
        elif _is_run(path) or (not is_sweep and _is_empty(path)):
            yield name, path


def read_summary(name: str, path: Path, monitor: LockMonitor) -> RunSummary:
    """Returns the summary of the run in the directory `path`. Nothing is locked, and no foreign code is run.

    A damaged run has the state "broken", and as much else as can be read. `name` is what the table calls it.
    """
    settings: Mapping[str, Any] = {}
    problem = ""
    try:
        settings = _read_settings(path / "config.yaml")
    except (CohortError, OSError, ValueError) as error:
        problem = f"config.yaml: {_shorten(error, path / 'config.yaml')}"
    curve = _CURVES.get(_get_text(settings, "kind", "rl"), _CURVES["rl"])
    overview = None
    try:
        with Reader(path / "run.db", once=True) as reader:
            overview = reader.read_overview(curve.metric, NUM_POINTS)
    except (CohortError, OSError) as error:
        problem = problem or f"run.db: {_shorten(error, path / 'run.db')}"
    if problem or overview is None:
        state, note = _find_state_of_damaged(path, settings, overview, monitor.is_held(path), problem)
    else:
        state, note = _find_state(path, settings, overview, monitor)
    return _make_summary(RunSummary(name=name, path=path, state=state, note=note), settings, overview, curve)


def read_summaries(folders: Sequence[Path]) -> list[RunSummary]:
    """Returns the summaries of all runs in the folders, each run once.

    If there are several folders, names are paths. Raises RunError if a folder does not exist.
    """
    monitor = LockMonitor()
    seen = set()
    summaries = []
    for folder in folders:
        for name, path in find_runs(folder):
            try:
                about = os.stat(path)
            # It was removed a moment ago.
            except OSError:
                continue
            if (about.st_dev, about.st_ino) not in seen:
                seen.add((about.st_dev, about.st_ino))
                summaries.append(read_summary(name if len(folders) == 1 else str(path), path, monitor))
    return summaries


def _make_summary(
    summary: RunSummary, settings: Mapping[str, Any], overview: Overview | None, curve: Curve
) -> RunSummary:
    """Returns the summary with what config.yaml and run.db tell. `overview` is None if run.db cannot be read."""
    differences = find_differences(settings, overview.command if overview else "")
    sweep = read_swept_settings(summary.path.parent)
    known = replace(
        summary,
        kind=_get_text(settings, "kind", "rl") if settings else "",
        recipe=_get_text(settings, "recipe"),
        model=_get_text(settings, "model"),
        num_steps=_get_num_steps(settings),
        curve=curve,
        settings=settings,
        split=_get_text(settings, "eval.split", "test") if settings else "",
        differences=adjust_differences(differences, settings, sweep) if sweep else differences,
        sweep=sweep,
    )
    if overview is None:
        return known
    last = max(overview.accuracies, default=0)
    trained = {step: value for step, value in overview.accuracies.items() if step > 0 and not math.isnan(value)}
    best = max(trained, key=lambda step: (trained[step], -step), default=0)
    newest, highest = overview.accuracies.get(last, math.nan), trained.get(best, math.nan)
    is_share = overview.measure == "accuracy"
    return replace(
        known,
        step=overview.step,
        started=overview.started,
        updated=overview.updated,
        eta=_estimate_seconds(overview, known.num_steps) if summary.state == "running" else math.nan,
        accuracy=newest if is_share else math.nan,
        accuracy_step=last,
        eval_reward=math.nan if is_share else newest,
        best_accuracy=highest if is_share else math.nan,
        best_eval_reward=math.nan if is_share else highest,
        best_step=best,
        values=overview.curve,
        metrics=overview.metrics,
        command=overview.command,
    )


def _find_state_of_damaged(
    path: Path, settings: Mapping[str, Any], overview: Overview | None, is_held: bool, problem: str
) -> tuple[State, str]:
    """Returns the state of a run that lacks a file or has a damaged one, and a note about it in one line.

    `problem` is what is wrong. A run whose start was interrupted, or is under way, has no config.yaml yet.
    """
    has_config = bool(settings) or (path / "config.yaml").exists()
    if has_config or (overview is not None and overview.step) or _list_folders(path / "checkpoints"):
        return "broken", problem
    return ("running", "it is being started") if is_held else ("empty", "its start was interrupted")


def _find_state(path: Path, settings: Mapping[str, Any], overview: Overview, monitor: LockMonitor) -> tuple[State, str]:
    """Returns the state of a run whose files can be read, and a note about it in one line."""
    steps = _get_num_steps(settings)
    if not steps:
        return "broken", "config.yaml: steps is missing or not a possible number"
    event = overview.last_run_event
    ending = str(event.text) if event else ""
    has_ended = ending == FINISHED or ending.startswith(STOPPED)
    if monitor.is_held(path) and (monitor.knows_locks or not has_ended):
        return "running", ""
    # Runs of earlier versions have no event of their end, but a card.
    if overview.step >= steps and (ending == FINISHED or (not has_ended and _is_saved(path, overview.step))):
        return "done", ""
    # It was extended, and is not continued yet.
    if ending == FINISHED:
        return "stopped", f"extended to {steps} steps"
    if has_ended:
        return "stopped" if ending.startswith(_ASKED_TO_STOP) else "crashed", ending.partition(";")[0]
    if monitor.may_be_elsewhere(path, overview.metrics.get("time/step", math.nan)):
        return "running?", "on another machine"
    if not overview.metrics:
        return "empty", "it ended before its first step"
    if event is not None and _was_written_after(path / "run.md", event.time):
        return "stopped", ""
    return "crashed", "killed, or the machine went down"


def _get_text(settings: Mapping[str, Any], name: str, default: str = "") -> str:
    """Returns a setting that is a text; `default` if it is missing or something else."""
    value = settings.get(name)
    return value if isinstance(value, str) else default


def _get_num_steps(settings: Mapping[str, Any]) -> int:
    """Returns the number of steps in the settings of a run; 0 if it is missing or no run can have it."""
    steps = settings.get("steps")
    return steps if type(steps) is int and 0 < steps <= MOST else 0


def _is_saved(path: Path, step: int) -> bool:
    """Returns whether a run has its card, or the checkpoint of a step."""
    return (path / "run.md").is_file() or (path / "checkpoints" / f"step-{step:06d}").is_dir()


def _was_written_after(file: Path, moment: float) -> bool:
    """Returns whether a file exists and was written after a moment, in seconds since 1970."""
    try:
        return file.stat().st_mtime > moment
    except OSError:
        return False


def _estimate_seconds(overview: Overview, num_steps: int) -> float:
    """Returns the seconds that the remaining steps will take, at the mean speed since the start; NaN = not known."""
    event = overview.last_run_event
    if event is None or overview.step <= event.step or not num_steps:
        return math.nan
    return (overview.updated - event.time) / (overview.step - event.step) * max(0, num_steps - overview.step)


def _read_settings(file: Path) -> dict[str, Any]:
    """Returns the settings of a config file by full name. Raises OSError, ValueError or CohortError if it has none."""
    about = os.stat(file)
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is not a file")
    # Four bytes are the most that a character takes.
    if about.st_size > 4 * MAX_SIZE:
        raise ValueError(f"it has {about.st_size} bytes, more than a config can have")
    text = file.read_text(encoding="utf-8")
    tree = read_regular_yaml(text)
    tree = read_yaml(text, "it") if tree is None else tree
    if not isinstance(tree, dict) or not tree:
        raise ValueError("it is empty or has no keys")
    return flatten_settings(move_old_settings(tree))


def _shorten(error: Exception, file: Path) -> str:
    """Returns what is wrong with a file as one short line, without the path of the file and without a remedy."""
    if isinstance(error, FileNotFoundError) or not file.exists():
        return "it is missing"
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    text = str(error.__cause__ or error).partition(". ")[0].partition("; ")[0]
    return " ".join(text.replace(f"{file} ", "it ").split())[:200]


def _is_run(path: Path) -> bool:
    """Returns whether a directory is a run, or what is left of one whose start was interrupted."""
    if any(os.path.lexists(f"{path}/{name}") for name in _RUN_FILES):
        return True
    return os.path.lexists(f"{path}/.lock") and _list_names(path) <= _MADE_FIRST


def _is_empty(path: Path) -> bool:
    """Returns whether a directory has nothing but folders that the start of a run makes, or nothing at all."""
    return os.access(path, os.R_OK) and _list_names(path) <= _MADE_FIRST


def _list_names(path: Path) -> set[str]:
    """Returns the names of everything in a directory; none if it cannot be read."""
    try:
        return set(os.listdir(path))
    except OSError:
        return set()


def _list_folders(folder: Path) -> list[str]:
    """Returns the names of the directories in a folder, sorted, hidden ones left out; [] if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except OSError:
        return []
