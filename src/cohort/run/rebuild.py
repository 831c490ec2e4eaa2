"""Repair of run.db: what a damaged, lost or incomplete database lacks is written again from the other files of the run.

metrics.jsonl has the metrics, rollout files have groups and samples, and eval/ has the results of evaluations. Events
are in run.db only. A kill during the repair does no harm: the next one writes what is still missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from cohort.config.names import get_current_metric_name
from cohort.errors import RunError
from cohort.logs.jsonlines import replace_non_finite
from cohort.logs.metrics_file import MetricsLine, read_metrics_file
from cohort.run.directory import RunDirectory
from cohort.run.store.checksum import compute_metrics_checksum
from cohort.run.store.db import Store
from cohort.run.store.examine import DatabaseState, examine_database
from cohort.run.store.rollouts import list_rollout_steps, load_rollouts, make_rollout_path
from cohort.system.disk import explain_disk_errors
from cohort.types import Group

# The metric of every step that has rows of groups: the size of its rollout file.
ROLLOUT_SIZE = "rollouts/bytes"
_DATABASE_ENDINGS = ("-wal", "-shm", "")  # the log first: without it run.db is incomplete, and is repaired next time


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairedState:
    """What `repair_database` did, and what it found."""

    sentences: list[str]  # about what was repaired; [] = nothing
    checksum: str  # of the metrics of all steps of the run


def repair_database(directory: RunDirectory, step: int, checksum: str | None) -> RepairedState:
    """Makes sure that run.db has every step up to `step`, with the metrics that the run had.

    `checksum` is that of the metrics of these steps, from the checkpoint; None = not known. A damaged file is kept
    beside run.db under another name. So is a metrics.jsonl with lines that cannot be read. The caller must hold the
    lock. Raises RunError, and changes nothing, if steps are missing in both run.db and metrics.jsonl, or neither fits
    the checksum.
    """
    database = examine_database(directory.database, step)
    lines, num_unreadable = read_metrics_file(directory.metrics)
    lines = _merge_lines(line for line in lines if line.step <= step)
    in_file = {line.step: line.metrics for line in lines if not line.is_evaluation}
    problem = f"metrics.jsonl has {num_unreadable} lines that cannot be read" if num_unreadable else ""
    found = database
    difference = "" if found.damage else _find_difference(found, lines, step)
    if (
        difference
        and checksum is not None
        and compute_metrics_checksum(found.steps, step) == checksum != (compute_metrics_checksum(in_file, step))
    ):
        # The checkpoint vouches for run.db, from which metrics.jsonl is written anew.
        problem, lines, in_file = f"metrics.jsonl does not fit the newest checkpoint ({difference})", [], {}
    elif damage := difference or _find_lost_samples(directory, found):
        found = DatabaseState(damage=damage)
    lost = set(range(1, step + 1)) - found.steps.keys() - in_file.keys()
    if lost:
        raise RunError(_describe_loss(directory, step, lost, found.damage))
    computed = compute_metrics_checksum({**in_file, **found.steps}, step)
    assert computed is not None, "no step is lost"
    if checksum not in (None, computed):
        names = [name for name, steps in (("run.db", database.steps), ("metrics.jsonl", in_file)) if steps]
        raise RunError(_describe_foreign(directory, step, names))
    sentences = []
    if problem:
        sentences.append(f"{problem}; the file is kept as {_copy_aside(directory.metrics)}.")
    if found.damage:
        kept = _set_aside(directory.database)
        sentences.append(f"run.db was damaged ({found.damage}); the file is kept as {kept}.")
    return RepairedState(sentences=sentences + _write_missing(directory, step, found, lines), checksum=computed)


def _merge_lines(lines: Iterable[MetricsLine]) -> list[MetricsLine]:
    """Returns one line per step and per evaluation. Lines that a file has twice are joined; the later one counts."""
    merged: dict[tuple[int, bool], MetricsLine] = {}
    for line in lines:
        key = (line.step, line.is_evaluation)
        earlier = merged[key].metrics if key in merged else {}
        merged[key] = replace(line, metrics={**earlier, **line.metrics})
    return list(merged.values())


def _find_difference(found: DatabaseState, lines: Iterable[MetricsLine], step: int) -> str:
    """Returns a text about the first step whose metrics differ between run.db and metrics.jsonl; "" = none.

    Steps and evaluations that only one of them has do not count.
    """
    for line in lines:
        # A kill may have come when the evaluation of the newest checkpoint was made again.
        if line.is_evaluation and line.step == step:
            continue
        stored = (found.evaluations if line.is_evaluation else found.steps).get(line.step)
        written = {get_current_metric_name(name): value for name, value in line.metrics.items()}
        # NaN and infinity, which JSON lacks, become None, and None equals None.
        if stored is not None and replace_non_finite(stored) != replace_non_finite(written):
            kind = "the evaluation after step" if line.is_evaluation else "step"
            return f"the metrics of {kind} {line.step} are not the same in run.db and metrics.jsonl"
    return ""


def _find_lost_samples(directory: RunDirectory, found: DatabaseState) -> str:
    """Returns a text about the first step of which run.db lacks samples that its rollout file has; "" = none."""
    for step in sorted(found.without_samples.intersection(list_rollout_steps(directory.rollouts))):
        # Given examples are in rollout files only.
        if ROLLOUT_SIZE in found.steps.get(step, {ROLLOUT_SIZE: 0.0}) and _load_fresh_groups(directory, step):
            return f"samples of step {step} are missing"
    return ""


def _write_missing(directory: RunDirectory, step: int, found: DatabaseState, lines: Sequence[MetricsLine]) -> list[str]:
    """Writes the steps and evaluations up to `step` that run.db does not have, and returns sentences about them."""
    steps: list[int] = []
    without_groups: list[int] = []
    evaluations: list[int] = []
    with closing(Store(directory.database)) as store:
        for line in lines:
            if line.is_evaluation and line.step not in found.evaluations:
                store.write_evaluation(line.step, line.metrics, line.time)
                evaluations.append(line.step)
            elif not line.is_evaluation and line.step not in found.steps:
                groups = _read_groups(directory, line)
                store.write_step(line.step, line.metrics, groups or (), time=line.time)
                steps.append(line.step)
                if groups is None:
                    without_groups.append(line.step)
        for number, evaluation in directory.load_evaluations().items():
            if number <= step and number not in found.evaluations and number not in evaluations:
                store.write_evaluation(number, evaluation.metrics)
                evaluations.append(number)
    if not steps and not evaluations:
        return []
    kinds = (("steps", steps), ("evaluations after steps", evaluations))
    lacked = " and ".join(f"the {kind} {format_steps(numbers)}" for kind, numbers in kinds if numbers)
    sentences = [f"run.db lacked {lacked}; they were written again from the other files of the run."]
    if without_groups:
        sentences.append(f"The samples of the steps {format_steps(without_groups)} are lost: no rollouts are left.")
    # A database that is lost, or was damaged and set aside, has left no events.
    all_events = "The events of these steps" if found.has_events else "All earlier events, the command among them,"
    return [*sentences, f"{all_events} are lost."]


def _read_groups(directory: RunDirectory, line: MetricsLine) -> list[Group] | None:
    """Returns the groups that a step sampled, from its rollout file.

    [] if the step had none; None if it had some, but its file is gone or damaged.
    """
    if ROLLOUT_SIZE not in line.metrics:
        return []
    return _load_fresh_groups(directory, line.step)


def _load_fresh_groups(directory: RunDirectory, step: int) -> list[Group] | None:
    """Returns the groups in the rollout file of a step that the step itself sampled; None if it cannot be read."""
    try:
        groups = load_rollouts(make_rollout_path(directory.rollouts, step))
    except RunError:
        return None
    return [group for group in groups if not group.reused and not group.is_given]


def _set_aside(database: Path) -> str:
    """Renames run.db and the files that SQLite has made for it, and returns the new name of run.db."""
    name = _find_free_name(database)
    with explain_disk_errors(database):
        for ending in _DATABASE_ENDINGS:
            file = database.with_name(database.name + ending)
            if file.exists():
                os.rename(file, file.with_name(name + ending))
    return name


def _copy_aside(path: Path) -> str:
    """Copies a file beside itself, and returns the name of the copy."""
    name = _find_free_name(path)
    with explain_disk_errors(path):
        shutil.copyfile(path, path.with_name(name))
    return name


def _find_free_name(path: Path) -> str:
    """Returns a name for a damaged file that no file beside it has: NAME.damaged, or NAME.damaged-2 and so on."""
    number = 1
    name = f"{path.name}.damaged"
    while any(path.with_name(name + ending).exists() for ending in _DATABASE_ENDINGS):
        number += 1
        name = f"{path.name}.damaged-{number}"
    return name


def _describe_loss(directory: RunDirectory, step: int, lost: set[int], damage: str) -> str:
    """Returns the error message for steps that are neither in run.db nor in metrics.jsonl."""
    path = directory.path
    state = f"run.db is damaged ({damage})" if damage else "run.db does not have them"
    return (
        f"the run {path} has done {step} steps, but the record of steps {format_steps(sorted(lost))} is lost: "
        f"{state}, and metrics.jsonl does not have them either. Restore run.db or metrics.jsonl from a copy. "
        f"{_describe_ways_out(path)}"
    )


def _describe_foreign(directory: RunDirectory, step: int, names: Sequence[str]) -> str:
    """Returns the error message for files, by name, whose metrics are not those that the checkpoint knows."""
    path = directory.path
    files = " and ".join(str(path / name) for name in names)
    are, they = ("are", "They") if len(names) > 1 else ("is", "It")
    return (
        f"{files} {are} damaged or of another run: the metrics up to step {step} are not those that this run had when "
        f"it wrote its newest checkpoint. {they} {are} left unchanged. Restore run.db or metrics.jsonl of this run "
        f"from a copy. {_describe_ways_out(path)}"
    )


def _describe_ways_out(path: Path) -> str:
    """Returns the end of a message: what the user can do about a run without its record, if there is no copy."""
    return (
        f"Without a copy, keep the model with `cohort export {path} OUT` and start a new run from it with `cohort "
        "train` and --model OUT; or move the folder checkpoints away, and the run starts again from its beginning."
    )


def format_steps(steps: Sequence[int]) -> str:
    """Returns sorted numbers of steps as text. Three and more without a gap are written as their first and last.

    >>> format_steps([3, 4, 5, 6]), format_steps([1, 3]), format_steps([])
    ('3 to 6', '1, 3', '')
    """
    if len(steps) > 2 and steps[-1] - steps[0] == len(steps) - 1:
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps))
