"""Sink for TensorBoard: event files in the run directory, under tensorboard/."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from cohort.logs.sinks.base import Sink, SinkRow
from cohort.logs.view import Header


class TensorboardSink(Sink):
    """Writes an event file with the whole run at every start. It tells readers to forget the files before it."""

    _writer: Any = None

    def connect(self, header: Header) -> None:
        """Opens a new event file under tensorboard/ in the run directory. It tells readers to forget earlier files."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._summary = Summary
        self._writer = EventFileWriter(str(Path(header.path) / "tensorboard"), flush_secs=5)
        # Readers drop all events of earlier files when they see this record.
        restart = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=0, session_log=restart))

    def write_row(self, row: SinkRow) -> None:
        """Writes the metrics of a row to the event file, at the row's step and time."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=row.time, step=row.step, summary=summary))

    def stop(self, ended_well: bool) -> None:
        """Closes the event file. `ended_well` has no effect: TensorBoard records no end."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
