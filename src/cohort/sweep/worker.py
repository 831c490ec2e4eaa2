"""The process of one run of a sweep: `python -m cohort.sweep.worker FOLDER NUMBER REPORTS PARENT`.

It starts the run, or resumes it, reports its progress as JSON lines to the file descriptor REPORTS, and writes how it
ended. It ends when its parent, the process of the sweep, is gone: its standard input is a pipe that nothing is written
to, and whose end says so. So the run is interrupted as by a kill, and resumes exactly.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cohort.config.document import diff_configs, load_variant
from cohort.errors import CohortError, RunError, suggest_name
from cohort.logs.forward import forward_logs
from cohort.logs.jsonlines import JsonView
from cohort.logs.printing import prepare_output, print_note
from cohort.logs.view import CombinedView, GuardedView, make_view
from cohort.run.checkpoint import list_steps
from cohort.run.directory import RunDirectory
from cohort.run.lock import Lock
from cohort.run.store.reader import Reader
from cohort.sweep.directory import RunResult, SweepDirectory
from cohort.sweep.plan import Plan, PlannedRun, format_train_command
from cohort.sweep.rules import StopRule, find_ending
from cohort.system import process
from cohort.system.kernel import die_with_parent

if TYPE_CHECKING:
    from cohort.config.schema import RunConfig
    from cohort.jobs.start import RunnableJob

_log = logging.getLogger("cohort.sweep")

INTERRUPTED = 130  # exit code: the run was asked to stop, and can be resumed
FAILED = 2  # exit code: an error that was reported
LOCK_SECONDS = 60.0  # for which the process of an earlier sweep may still hold the lock of a run
_LOCK_POLL_SECONDS = 0.1
# What a run records where the machine or the model cannot do what the recipe says.
_CHOSEN_AT_START = (("engine.weights", "shared"), ("learner.prefix_sharing", False))


def main(argv: list[str]) -> int:
    """Runs one run of a sweep to its end, and returns the exit code. `argv` are the words of the command line."""
    folder, number, reports, parent = argv
    _end_with_parent(int(parent))
    prepare_output()
    process.keep_freed_memory()
    # What the run starts must not hold the pipe open.
    os.set_inheritable(int(reports), False)
    stream = os.fdopen(int(reports), "w", encoding="ascii")
    try:
        directory = SweepDirectory.open(Path(folder))
        run = directory.plan.list_runs()[int(number) - 1]
        view = CombinedView([GuardedView(JsonView(stream)), make_view("plain")])
        directory.save_result(run, _train(directory, run, view))
    except CohortError as error:
        # The message of a user's own code has further lines, which show where.
        print_note(f"cohort: {error}")
        with suppress(OSError):
            stream.write(json.dumps({"kind": "error", "text": " ".join(str(error.args[0]).split())}) + "\n")
            stream.flush()
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _end_with_parent(parent: int) -> None:
    """Makes this process end when the process `parent` does, however it ends.

    The kernel does it on Linux. A thread that waits for the end of standard input does it elsewhere.
    """

    def wait_for_end() -> None:
        """Ends the process at the end of standard input."""
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()
    die_with_parent(parent)


def _train(directory: SweepDirectory, run: PlannedRun, view: CombinedView) -> RunResult:
    """Starts a run of a sweep, or resumes it, and returns how it ended. Raises KeyboardInterrupt if it is to stop."""
    # Imported here because it imports torch: a parent that is gone must be noticed before.
    from cohort.jobs.build import build_job
    from cohort.run.life import Run

    path = directory.get_run_path(run)
    opened = _open_run(path)
    planned = _settle_config(directory.plan, run)
    if opened is not None:
        require_planned(opened.config, planned, max(list_steps(opened.checkpoints), default=0))
    job = build_job(planned if opened is None else opened.config)
    try:
        if opened is None:
            command = format_train_command(directory.plan, run)
            opened = RunDirectory.create(path.parent, job.config, path.name, command=command)
        check = partial(_find_ending, directory.plan.rules, opened.database)
        with (
            Run(opened, job.config, job, view, stop_check=check) as training,
            forward_logs(training.record_event, training.show_notice),
        ):
            job.run_loop(training)
            summary = training.finish()
    finally:
        job.close()
    if not summary.complete:
        raise KeyboardInterrupt
    return RunResult(
        state="stopped" if summary.ended_by else "done",
        step=summary.step,
        why=summary.ended_by,
        undecided=_list_undecided(directory.plan.rules, opened.database, min(summary.step, job.config.steps - 1)),
        eval_command=_find_eval_command(job, summary.step),
    )


def _find_ending(rules: Sequence[StopRule], database: Path, step: int) -> str:
    """Returns why a rule ends a run after `step` steps, by what its run.db has of that step; "" = it goes on.

    After the first step, warns of rules about metrics that this step does not have: their names may be wrong.
    """
    if step > 1 and all(rule.step != step for rule in rules):
        return ""
    with Reader(database) as reader:
        metrics = {row.name: row.value for row in reader.read_metrics(step=step)}
    for rule in rules if step == 1 else ():
        if rule.metric not in metrics and not rule.needs_evaluation:
            _log.info("%s: the first step has no such metric.%s", rule.spelling, suggest_name(rule.metric, metrics))
    return find_ending(rules, step, metrics)


def _list_undecided(rules: Sequence[StopRule], database: Path, last: int) -> list[str]:
    """Returns the rules up to the step `last` that decided nothing, because the run did not have their metric."""
    with Reader(database) as reader:
        passed = [rule for rule in rules if rule.step <= last]
        return [rule.spelling for rule in passed if not reader.read_metrics(step=rule.step, name=rule.metric)]


def _open_run(path: Path) -> RunDirectory | None:
    """Returns the run in the directory `path`, locked; None if there is none. A half-made directory is removed.

    Waits while the process of an earlier sweep still holds the lock. Raises RunError if it does so for too long.
    """
    if not path.exists():
        return None
    lock = Lock(path / ".lock")
    _acquire_patiently(lock)
    if (path / "config.yaml").is_file():
        # Between these two lines no other process can come: the process of the sweep starts only one per run.
        lock.release()
        directory = RunDirectory.open(path, load_variant)
        directory.lock()
        return directory
    shutil.rmtree(path)
    return None


def _acquire_patiently(lock: Lock) -> None:
    """Takes a lock, and waits up to LOCK_SECONDS for it. Raises RunError if another process keeps it."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            lock.acquire()
            return
        except RunError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_LOCK_POLL_SECONDS)


def _settle_config(plan: Plan, run: PlannedRun) -> RunConfig:
    """Returns the config of a new run. All runs of a sweep have the same date, if their prompts contain one."""
    from cohort.jobs.inputs import settle_inputs

    config = plan.load_config(run.values, run.seed)
    settled = settle_inputs(config)
    return replace(settled, date=plan.date) if settled.date and not config.date else settled


def require_planned(found: RunConfig, planned: RunConfig, step: int) -> None:
    """Raises RunError if the settings of an existing run are not those of the plan, or it has more steps.

    Someone has extended it, or edited its config.yaml, and the table would compare it with the others. `planned` is the
    config with which a new run would begin; what is chosen for the machine when a run begins may differ. `step` is the
    step of the newest checkpoint.
    """
    anew = "Move its folder away, and resume the sweep: then it is trained anew."
    changed = {
        name: (old, new)
        for name, (old, new) in diff_configs(found, planned).items()
        if new != "auto" and (name, old) not in _CHOSEN_AT_START
    }
    if step > planned.steps and not changed:
        raise RunError(f"it has been trained for {step} steps, and the sweep trains {planned.steps}. {anew}")
    if not changed:
        return
    name, (old, new) = next(iter(changed.items()))
    more = f" (and {len(changed) - 1} more that differ)" if len(changed) > 1 else ""
    raise RunError(f"its config.yaml has {name} = {old}, and the sweep {new}{more}. {anew}")


def _find_eval_command(job: RunnableJob, step: int) -> list[str]:
    """Returns the words after `cohort` that evaluate the model of a run, in which RUN stands for its path; [] if none.

    They name no split, so the problems are those of the test split. A task without test rows has no such command.
    """
    commands = job.suggest_commands(Path("RUN"), step)
    on_test = [words for words in commands if words[1] == "eval" and "--split" not in words]
    return next((words[1:] for words in on_test if f"RUN@{step}" in words), [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
