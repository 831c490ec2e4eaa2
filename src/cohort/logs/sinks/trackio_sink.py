"""Trackio: a local dashboard, or a server where its own settings name one."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from typing import Any

from cohort.logs.sinks.base import Sink, SinkRow
from cohort.logs.view import Header

PROJECT = "cohort"


class TrackioSink(Sink):
    """A resumed run goes on in the one of its name."""

    _run: Any = None

    def connect(self, header: Header) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self._trackio = trackio
        with redirect_stdout(sys.stderr):  # where it greets; stdout may be JSON lines for a program
            self._run = trackio.init(
                project=PROJECT, name=header.name, config=header.config, resume="allow", embed=False
            )
        logs = SQLiteStorage.get_logs(PROJECT, header.name, run_id=self._run.id)
        self._there = {(log["step"], "eval/accuracy" in log) for log in logs}
        # What a server has cannot be asked: it is supposed to have got everything before this start.
        remote = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        self._before = header.first_step if remote else -1

    def has(self, row: SinkRow) -> bool:
        return row.step <= self._before or (row.step, row.of_evaluation) in self._there

    def write(self, row: SinkRow) -> None:
        self._run.log(dict(row.metrics), step=row.step)

    def stop(self, ended_well: bool) -> None:
        if self._run is not None:
            self._run = None
            with redirect_stdout(sys.stderr):
                self._trackio.finish()  # the run's own `finish` would be called once more when Python ends
