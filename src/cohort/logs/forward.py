"""What the parts of a run write to Python's log: seen by the user and, if it is a warning, kept with the step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

KINDS = {"engines": "engine", "learner": "learner"}


Told = Callable[[str, str], None]
"""(kind, text)"""


class _Forward(logging.Handler):
    def __init__(self, event: Told, notice: Told) -> None:
        super().__init__(logging.INFO)
        self._event, self._notice = event, notice

    def emit(self, record: logging.LogRecord) -> None:
        part = record.name.split(".")[1:2]
        tell = self._event if record.levelno >= logging.WARNING else self._notice
        tell(KINDS.get(part[0], part[0]) if part else "log", record.getMessage())


@contextmanager
def forwarded(event: Told, notice: Told) -> Iterator[None]:
    """Within, warnings of Cohort's own loggers become events, and messages of level INFO notices."""
    log, handler = logging.getLogger("cohort"), _Forward(event, notice)
    level = log.level
    log.addHandler(handler)
    log.setLevel(min(level, logging.INFO) if level else logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
