"""Sink for Trackio: a local dashboard, or a server if Trackio's own settings name one."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from cohort.evaluation.records import HELD_OUT_METRICS
from cohort.logs.sinks.base import Sink, SinkRow, read_rows
from cohort.logs.view import Header

PROJECT = "cohort"


class TrackioSink(Sink):
    """Sends rows to the Trackio run that has the name of the run directory. A resumed run continues there."""

    _run: Any = None

    def connect(self, header: Header) -> None:
        """Opens or continues the Trackio run with the name of the run directory, and reads which rows it has locally.

        A server, if one is set, is assumed to have all rows that metrics.jsonl has when this start begins.
        """
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self._trackio = trackio
        # Trackio prints a greeting, and stdout may be JSON lines for a program.
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=PROJECT, name=header.name, config=header.config, resume="allow", embed=False
            )
        logs = SQLiteStorage.get_logs(PROJECT, header.name, run_id=self._run.id)
        self._known_rows = {(log["step"], any(name in log for name in HELD_OUT_METRICS)) for log in logs}
        # A server cannot be asked which rows it has. It is assumed to have all rows from before this start. Steps would
        # not tell: the evaluation of the step at which a start begins may still have to be made, as that of step 0.
        remote = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        self._num_old_rows = len(list(read_rows(Path(header.path) / "metrics.jsonl"))) if remote else 0

    def has_row(self, row: SinkRow) -> bool:
        """Returns whether Trackio had a row of this step and kind (step or evaluation) before this start.

        A server is assumed to have every row that metrics.jsonl had when this start began.
        """
        return row.number < self._num_old_rows or (row.step, row.is_evaluation) in self._known_rows

    def write_row(self, row: SinkRow) -> None:
        """Sends the metrics of a row to Trackio, at the row's step."""
        self._run.log(dict(row.metrics), step=row.step)

    def stop(self, ended_well: bool) -> None:
        """Ends the Trackio run. `ended_well` has no effect: Trackio records no failure."""
        if self._run is not None:
            self._run = None
            with redirect_stdout(sys.stderr):
                # Not the `finish` of the run object, which would be called once more when Python ends.
                self._trackio.finish()
