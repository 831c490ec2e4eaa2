"""The start of a run, new or resumed: back to the newest checkpoint, with a database that has every step up to it."""

from __future__ import annotations

from dataclasses import dataclass

from cohort.config.schema import RunConfig
from cohort.errors import RunError
from cohort.evaluation.records import HELD_OUT_METRICS, Evaluation
from cohort.logs.metrics_file import MetricsFile
from cohort.run import checkpoint
from cohort.run.card import EXTENSION
from cohort.run.directory import RunDirectory
from cohort.run.job import Job
from cohort.run.rebuild import format_steps, repair_database
from cohort.run.store.db import Store
from cohort.run.store.reader import Reader

NUM_STEPS = "num_steps"
"""Name in a checkpoint of the total number of steps, over which schedules are spread."""

METRICS_CHECKSUM = "metrics_crc32"
"""Name in a checkpoint of the checksum of the metrics of all its steps."""

Notice = tuple[str, str]
"""(kind, text) of an event that the user must see when a run is resumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredState:
    """Where a run continues."""

    step: int  # completed
    has_checkpoint: bool
    checksum: str  # of the metrics of all completed steps
    notices: list[Notice]  # repairs, and that the run was extended


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierResults:
    """What a run has recorded up to the step where it continues."""

    evaluations: dict[int, Evaluation]  # by step
    accuracies: dict[int, float]  # by step; also those of evaluations whose files were removed
    notices: list[Notice]


def restore_newest(directory: RunDirectory, config: RunConfig, job: Job) -> RestoredState:
    """Restores the newest checkpoint into the job, and repairs run.db if it is damaged or lacks steps.

    Without a checkpoint the run is at step 0. The run takes over what `config` changes. Raises RunError,
    before anything is changed, if the checkpoint or the record of the run is damaged, the record is of another run, or
    `config` has fewer steps than before. The caller must hold the lock.
    """
    checkpoint.remove_leftovers(directory.checkpoints)
    path = checkpoint.find_latest(directory.checkpoints)
    state = checkpoint.load(path) if path else None
    step = state.step if state else 0
    old_steps = directory.config.steps
    if state:
        # Checkpoints of earlier versions do not have the number.
        old_steps = int(state.numbers.get(NUM_STEPS, max(old_steps, step)))
        _require_steps(directory, config, old_steps)
        job.restore(state)
    # Checkpoints of earlier versions do not have the checksum.
    repair = repair_database(directory, step, state.numbers.get(METRICS_CHECKSUM) if state else None)
    notices = [("repair", text) for text in repair.sentences]
    directory.make_folders()
    if changed := directory.adopt(config):
        notices.append(("settings", f"changed after step {step}: {', '.join(changed)}"))
    if config.steps > old_steps:
        effect = job.describe_extension(step, old_steps, config.steps)
        text = f"extended after step {step}, from {old_steps} to {config.steps} steps"
        notices.append((EXTENSION, f"{text}; {effect}" if effect else text))
    return RestoredState(step=step, has_checkpoint=state is not None, checksum=repair.checksum, notices=notices)


def take_back_later_steps(
    directory: RunDirectory, state: RestoredState, store: Store, metrics: MetricsFile
) -> EarlierResults:
    """Removes everything that the run wrote after the step of `state`, and returns what it recorded before.

    Also records the notices of `state`, and the event that the run started or resumed.
    """
    step = state.step
    store.remove_after(step)
    # Without a checkpoint the first evaluation goes too: the task may have other problems now.
    directory.remove_after(step if state.has_checkpoint else -1)
    metrics.rewrite()
    evaluations = directory.load_evaluations()
    with Reader(directory.database) as reader:
        recorded = {(event.kind, event.text) for event in reader.read_events()}
        # A grader that has changed may measure something else: only what the newest evaluation measured is compared.
        measured = [reader.read_series(name) for name in HELD_OUT_METRICS]
    accuracies = max(measured, key=lambda series: max(series, default=-1))
    notices = [*state.notices]
    # The evaluation of the current step is made again if it is due, so its file may be missing after a kill.
    if gone := sorted(accuracies.keys() - evaluations.keys() - {step}):
        text = f"the evaluations after steps {format_steps(gone)} are in run.db, but their files in eval are gone"
        notices.append(("repair", f"{text}: cohort compare cannot use them"))
    # After a kill the same extension is noticed again.
    for kind, text in notices:
        if (kind, text) not in recorded:
            store.write_event(step, kind, text)
    was_started = step > 0 or any(kind == "run" for kind, _ in recorded)
    store.write_event(step, "run", f"resumed after step {step}" if was_started else "started")
    return EarlierResults(evaluations=evaluations, accuracies=accuracies, notices=notices)


def _require_steps(directory: RunDirectory, config: RunConfig, old_steps: int) -> None:
    """Raises RunError if the config has fewer steps than the run had when its newest checkpoint was made."""
    if config.steps < old_steps:
        path = directory.path
        raise RunError(
            f"the run {path} had {old_steps} steps, but {directory.config_file} now says steps: {config.steps}. A run "
            f"can be extended, not shortened: continue it with `cohort resume {path} --steps {old_steps}`, which puts "
            "the number back."
        )
