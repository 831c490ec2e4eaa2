"""A run that a stop check ends: where it ends, what it leaves, and that interruptions do not change it."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

from cohort.config.kinds import RL
from cohort.logs.view import Summary, make_view
from cohort.run import checkpoint
from cohort.run.directory import RunDirectory
from cohort.run.life import Run
from tests.helpers.pretend_run import PretendJob, collect_remains, pretend_groups, small_run


def run_until(directory: RunDirectory, last: int, signal_at: int = 0) -> tuple[Summary, list[int]]:
    """Runs or resumes a run that ends after step `last`. Returns its summary and the steps that it was asked about.

    A signal comes in the middle of step `signal_at`, counted from 1; 0 = none.
    """
    asked = []

    def check(step: int) -> str:
        asked.append(step)
        return "it is enough" if step == last else ""

    config = directory.config
    assert isinstance(config, RL)
    job = PretendJob(config)
    with Run(directory, config, job, make_view("plain", io.StringIO()), stop_check=check) as run:
        for step in run.steps():
            record = job.step(step, pretend_groups(step))
            if step + 1 == signal_at:
                os.kill(os.getpid(), signal.SIGINT)
            run.end_step(step, record)
        return run.finish(), asked


def test_a_run_ends_where_the_check_says_and_is_complete(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, small_run(), "a")
    summary, asked = run_until(directory, 4)
    assert asked == [1, 2, 3, 4] and (summary.step, summary.num_steps, summary.complete) == (4, 6, True)
    # It is evaluated where it ended, besides the steps 0 and 3.
    assert list(directory.load_evaluations()) == [0, 3, 4]
    assert checkpoint.list_steps(directory.checkpoints)[-1] == 4
    assert "ended after step 4 of 6: it is enough" in directory.card.read_text()


def test_a_resumed_run_is_asked_again_and_leaves_the_same(tmp_path: Path) -> None:
    first = RunDirectory.create(tmp_path, small_run(), "a")
    run_until(first, 4)
    left = collect_remains(first)
    again, asked = run_until(RunDirectory.open(first.path), 4)
    assert asked == [4] and again.complete and collect_remains(first) == left
    # A signal in the step of the decision: the run is not evaluated and not asked, so it is not complete.
    second = RunDirectory.create(tmp_path, small_run(), "b")
    stopped, asked = run_until(second, 4, signal_at=4)
    assert asked == [1, 2, 3] and not stopped.complete and stopped.ended_by == ""
    resumed, asked = run_until(RunDirectory.open(second.path), 4)
    assert asked == [4] and resumed.complete and collect_remains(second) == left


def test_the_last_step_is_not_asked_about(tmp_path: Path) -> None:
    summary, asked = run_until(RunDirectory.create(tmp_path, small_run(), "a"), 6)
    assert asked == [1, 2, 3, 4, 5] and summary.complete and summary.ended_by == ""
