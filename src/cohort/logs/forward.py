"""Forwarding of log records: messages of Cohort's modules reach the user, and warnings are stored with the step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

KINDS = {"engines": "engine", "learner": "learner"}
"""The kind of event by the package that logs; other packages use their own name."""

Receiver = Callable[[str, str], None]
"""Called with the kind of an event and its text."""


class _ForwardingHandler(logging.Handler):
    """A log handler that passes warnings to `event` and other records to `notice`."""

    def __init__(self, event: Receiver, notice: Receiver) -> None:
        super().__init__(logging.INFO)
        self._event = event
        self._notice = notice

    def emit(self, record: logging.LogRecord) -> None:
        """Calls `event` for a record of level WARNING or above, else `notice`, with the kind of event and the message.

        The kind is made from the name of the logging package; "log" if the logger is "cohort" itself.
        """
        # The package under `cohort`, for instance ["engines"]; empty for the logger "cohort" itself.
        part = record.name.split(".")[1:2]
        receive = self._event if record.levelno >= logging.WARNING else self._notice
        receive(KINDS.get(part[0], part[0]) if part else "log", record.getMessage())


@contextmanager
def forward_logs(event: Receiver, notice: Receiver) -> Iterator[None]:
    """While this context is open, passes warnings and errors of Cohort's loggers to `event`, INFO messages to `notice`.

    Both are called with the kind of event, such as "engine", and the message. DEBUG messages are not passed on. At the
    end the log level is restored.
    """
    log = logging.getLogger("cohort")
    handler = _ForwardingHandler(event, notice)
    level = log.level
    log.addHandler(handler)
    log.setLevel(min(level, logging.INFO) if level else logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
