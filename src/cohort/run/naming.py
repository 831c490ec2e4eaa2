"""The names of a run's checkpoints: RUN is the newest one, RUN@STEP that of a step, RUN@best the most accurate one.

The config of a run is not read, so that nothing that it names is run. Torch is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cohort.errors import RunError
from cohort.evaluation.records import select_comparable
from cohort.run import checkpoint
from cohort.run.directory import load_evaluations
from cohort.run.finding import find_run, is_run, is_sweep, require_run
from cohort.system.paths import expand_home


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedCheckpoint:
    """A checkpoint that exists, found by its name."""

    run: Path
    step: int
    # "TASK/SPLIT" of the evaluations that chose this checkpoint as the best of its run; "" = they did not choose it.
    chosen_on: str = ""

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""
        return self.run / "checkpoints" / checkpoint.folder_name(self.step)

    @property
    def name(self) -> str:
        """RUN@STEP, with the run as it was given."""
        return f"{self.run}@{self.step}"


def split_name(name: str) -> tuple[Path, str]:
    """Returns the parts before and after the last @ of `name`: a path, and a step, "best" or "last".

    The second is "" if there is no @, or if a file or folder has the whole name.

    >>> split_name("runs/a@12"), split_name("runs/a")
    ((PosixPath('runs/a'), '12'), (PosixPath('runs/a'), ''))
    """
    before, separator, which = name.rpartition("@")
    if not separator or Path(name).exists():
        return Path(name), ""
    return Path(before), which


def find_checkpoint(name: str) -> NamedCheckpoint | None:
    """Returns the checkpoint that `name` means: RUN, RUN@STEP, RUN@best, RUN@last, or the folder of a checkpoint.

    RUN is as in `find_run`. None if `name` has no @ and is not of a run. Raises RunError if there is no such run or
    checkpoint, or if several runs fit.
    """
    path, which = split_name(str(expand_home(name)))
    path = find_run(path)
    if name.endswith("@") and not expand_home(name).exists():
        raise RunError(f"{name} names no checkpoint: after the @ a step, best or last is missing. Add it.")
    if is_run(path):
        return choose_checkpoint(path, which or "last")
    if which or is_sweep(path):
        require_run(path)
    step = checkpoint.read_step(path)
    if step is not None and is_run(run := path.parent.parent):
        return choose_checkpoint(run, str(step))
    return None


def choose_checkpoint(run: Path, which: str) -> NamedCheckpoint:
    """Returns the checkpoint of the run in the directory `run` that `which` names.

    `which` is the number of a step, "best" (highest held-out accuracy or reward; the earliest of equal ones) or "last".
    Raises RunError if there is none, or if "best" is not known for lack of evaluations.
    """
    steps = checkpoint.list_steps(run / "checkpoints")
    if not steps:
        raise RunError(
            f"the run {run} has no checkpoint. A run writes one at its end, and every save.every steps: wait while it "
            f"trains, or continue it with `cohort resume {run}`."
        )
    known = f"It has checkpoints of these steps: {', '.join(map(str, steps))}. Name one as {run}@{steps[-1]}"
    if which == "last":
        return NamedCheckpoint(run=run, step=steps[-1])
    if which == "best":
        evaluations = select_comparable(load_evaluations(run))
        best = find_best_step({step: evaluation.value for step, evaluation in evaluations.items()})
        if not best:
            raise RunError(
                f"the run {run} has no evaluation of a trained model, so best cannot choose a checkpoint. {known}."
            )
        if best not in steps:
            raise RunError(f"the run {run} is best after step {best}, but has no checkpoint of that step. {known}.")
        setting = evaluations[best].setting
        return NamedCheckpoint(run=run, step=best, chosen_on=f"{setting.task}/{setting.split}")
    if not re.fullmatch(r"[0-9]{1,12}", which) or int(which) not in steps:
        first = ". The model before training has none: give the name of that model itself" if which == "0" else ""
        raise RunError(f"{run} has no checkpoint {which}. {known}, or best or last{first}.")
    return NamedCheckpoint(run=run, step=int(which))


def find_best_step(accuracies: Mapping[int, float]) -> int:
    """Returns the step above 0 with the best held-out accuracy or reward, the earliest of equal ones; 0 = none.

    `accuracies` (or mean rewards) are those of the evaluations of a run, by step.
    """
    # Step 0 is the initial model, which has no checkpoint.
    trained = [step for step in accuracies if step > 0]
    return max(trained, key=lambda step: (accuracies[step], -step)) if trained else 0
