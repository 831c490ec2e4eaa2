"""The run of a sweep: starts or resumes every run that has not ended, one after another or several at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cohort.run.checkpoint import list_steps
from cohort.run.signals import StopSignals
from cohort.sweep.directory import RunResult, SweepDirectory
from cohort.sweep.plan import PlannedRun
from cohort.sweep.process import Child, Report, wait_for_reports

_WAIT_SECONDS = 0.5  # after which the processes are looked at, if none has reported anything


class Progress(Protocol):
    """Shows how the runs of a sweep get on."""

    def begin_run(self, run: PlannedRun) -> None:
        """Shows that a run is started or resumed."""

    def show_report(self, run: PlannedRun, report: Report) -> None:
        """Shows what a run reports."""

    def end_run(self, run: PlannedRun, result: RunResult | None, is_saved: bool) -> None:
        """Shows how a run ended; None = it was interrupted. `is_saved` = it has a checkpoint."""


def run_sweep(directory: SweepDirectory, runs: Sequence[PlannedRun], jobs: int, progress: Progress) -> bool:
    """Runs `runs` of a sweep, at most `jobs` at once, and returns whether all of them have ended.

    They have not after a Ctrl-C, SIGTERM or SIGHUP: then each run under way finishes its step and saves. A second
    signal ends them at once, and raises KeyboardInterrupt. A run that fails does not end the others.
    """
    waiting = list(runs)
    children: list[Child] = []
    is_told = False
    num_ended = 0
    signals = StopSignals()
    signals.install()
    try:
        while children or (waiting and not signals.requested):
            while waiting and len(children) < jobs and not signals.requested:
                progress.begin_run(waiting[0])
                children.append(Child(directory, waiting.pop(0)))
            if signals.requested and not is_told:
                is_told = True
                for child in children:
                    child.ask_to_stop()
            wait_for_reports(children, _WAIT_SECONDS)
            for child in list(children):
                # Asked first: what a process wrote before its end is then in the pipe.
                has_ended = child.has_ended()
                for report in child.read_reports():
                    progress.show_report(child.run, report)
                if has_ended:
                    children.remove(child)
                    result = child.close()
                    num_ended += result is not None
                    checkpoints = directory.get_run_path(child.run) / "checkpoints"
                    progress.end_run(child.run, result, bool(list_steps(checkpoints)))
    finally:
        for child in children:
            child.kill()
        signals.restore()
    return num_ended == len(runs)
