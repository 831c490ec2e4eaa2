"""What the parts of a run write to Python's log, as events of the run: seen by the user and kept with the step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

KINDS = {"engines": "engine", "learner": "learner"}


class _Forward(logging.Handler):
    def __init__(self, event: Callable[[str, str], None]) -> None:
        super().__init__(logging.INFO)
        self._event = event

    def emit(self, record: logging.LogRecord) -> None:
        part = record.name.split(".")[1:2]
        self._event(KINDS.get(part[0], part[0]) if part else "log", record.getMessage())


@contextmanager
def forwarded(event: Callable[[str, str], None]) -> Iterator[None]:
    """Within, messages of level INFO and above of Cohort's own loggers become events."""
    log, handler = logging.getLogger("cohort"), _Forward(event)
    level = log.level
    log.addHandler(handler)
    log.setLevel(min(level, logging.INFO) if level else logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
