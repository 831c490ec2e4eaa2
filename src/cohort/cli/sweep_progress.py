"""The progress of a sweep on a terminal: one line per run under way, redrawn in place. Elsewhere plain lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cohort.sweep.directory import RunResult
from cohort.sweep.plan import PlannedRun
from cohort.sweep.process import Report
from cohort.sweep.progress import LineProgress, describe_report, describe_result
from cohort.sweep.run import Progress

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table


@contextmanager
def open_progress(num_runs: int, num_done: int) -> Iterator[Progress]:
    """Yields what shows the progress of `num_runs` runs, of which `num_done` are done, on standard error."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "") in ("", "dumb"):
        yield LineProgress(num_runs, num_done)
        return
    # Imported here because they import rich, which no module of a command needs for its help.
    from rich.live import Live

    from cohort.logs.console import make_console

    with Live(console=make_console(stderr=True), auto_refresh=False, transient=True) as live:
        yield LiveProgress(live, num_runs, num_done)


class LiveProgress:
    """Draws one line per run under way, and prints a line above them when a run has ended."""

    def __init__(self, live: Live, num_runs: int, num_done: int) -> None:
        self._live = live
        self._num_runs = num_runs
        self._num_done = num_done
        self._lines: dict[int, tuple[str, str]] = {}  # name of the run and where it is, by number

    def begin_run(self, run: PlannedRun) -> None:
        """Adds the line of a run."""
        self._lines[run.number] = (run.name, "starts")
        self._draw()

    def show_report(self, run: PlannedRun, report: Report) -> None:
        """Shows step, reward and remaining time of a run, or its accuracy."""
        if text := describe_report(report):
            self._lines[run.number] = (run.name, text)
            self._draw()

    def end_run(self, run: PlannedRun, result: RunResult | None, is_saved: bool) -> None:
        """Prints how a run ended, and removes its line."""
        self._num_done += result is not None
        del self._lines[run.number]
        self._live.console.print(f"{run.name}  {describe_result(result, is_saved)}")
        self._draw()

    def _draw(self) -> None:
        """Draws all lines anew."""
        self._live.update(self._make_frame(), refresh=True)

    def _make_frame(self) -> Table:
        """Returns the lines of the runs under way, and one with how many are done."""
        from rich.table import Table

        frame = Table.grid(padding=(0, 2))
        for name, text in self._lines.values():
            frame.add_row(name, text)
        frame.add_row(f"{self._num_done} of {self._num_runs} runs have ended", "", style="dim")
        return frame
