"""Collects what the runs of a sweep have reached, and writes the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from cohort.errors import RunError
from cohort.evaluation.records import Evaluation
from cohort.evaluation.statistics import mean
from cohort.logs.escape import escape_line
from cohort.run.directory import load_evaluation
from cohort.run.store.reader import Reader
from cohort.sweep.directory import RunResult, SweepDirectory
from cohort.sweep.plan import PlannedRun
from cohort.sweep.records import RunRecord, SweepTable
from cohort.sweep.render import render_json, render_markdown
from cohort.sweep.rules import ACCURACY
from cohort.sweep.table import make_table
from cohort.system.disk import write_atomically

REWARD_STEPS = 5  # over which the training reward of a run is averaged
_MAX_WHY = 300  # characters of a reason in the table


def collect_table(directory: SweepDirectory, runs: Sequence[PlannedRun]) -> SweepTable:
    """Returns the table of a sweep from the files of its runs."""
    return make_table(directory.path.name, directory.plan, [load_record(directory, run) for run in runs])


def load_record(directory: SweepDirectory, run: PlannedRun) -> RunRecord:
    """Returns what a run has reached. One that has not ended, or failed, has no evaluation that counts.

    A run that has ended, but whose folder or evaluation is gone or damaged, has the state "missing" and says why.
    """
    result = directory.load_result(run)
    if result is None or result.state == "failed":
        return RunRecord(run=run, result=result)
    path = directory.get_run_path(run)
    try:
        if not (path / "config.yaml").is_file():
            raise RunError("its folder, or the config.yaml in it, is gone")
        evaluation = _load_evaluation(path, result.step)
        loss, reward = (None, None) if evaluation is not None else _read_training(path, result.step)
    except RunError as error:
        # The table has no paths of this machine.
        why = escape_line(" ".join(str(error).replace(f"{directory.path}/", "").split()), _MAX_WHY)
        return RunRecord(run=run, result=RunResult(state="missing", why=why))
    return RunRecord(run=run, result=result, evaluation=evaluation, loss=loss, training_reward=reward)


def _load_evaluation(path: Path, step: int) -> Evaluation | None:
    """Returns the evaluation of a run after its last step, `step`; None if the run is not evaluated.

    A run that was extended by hand has later ones, which do not count. Raises RunError if the file is damaged, or is
    gone: run.db still tells that there was one.
    """
    file = path / "eval" / f"step-{step:06d}.json"
    if file.exists():
        try:
            return load_evaluation(file)
        except RunError as error:
            raise RunError(f"its eval/{file.name} is damaged. Delete that file, then resume the sweep") from error
    with Reader(path / "run.db", once=True) as reader:
        if reader.read_metrics(step=step, name=ACCURACY):
            raise RunError(f"its evaluation after step {step} is gone")
    return None


def _read_training(path: Path, step: int) -> tuple[float | None, float | None]:
    """Returns the loss of a run in its last step, and its mean reward over the last REWARD_STEPS steps.

    Either is None if it is not known or not a number: a run of supervised fine-tuning has no rewards.
    """
    with Reader(path / "run.db", once=True) as reader:
        loss = reader.read_series("loss").get(step, math.nan)
        rewards = reader.read_series("reward/mean")
    # One step has few prompts, and says little.
    last = [reward for at, reward in rewards.items() if step - REWARD_STEPS < at <= step]
    reward = mean(last) if last else math.nan
    return loss if math.isfinite(loss) else None, reward if math.isfinite(reward) else None


def write_table(directory: SweepDirectory, table: SweepTable) -> None:
    """Writes sweep.md and sweep.json."""
    write_atomically(directory.path / "sweep.md", render_markdown(table))
    write_atomically(directory.path / "sweep.json", render_json(table))
