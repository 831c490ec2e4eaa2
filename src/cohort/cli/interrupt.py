"""Ctrl-C while modules are imported: the command ends at once, because a half-imported module cannot be used."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from cohort.logs.printing import flush_output
from cohort.system.ending import is_importing, restore_terminal

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""


@contextmanager
def exit_from_imports() -> Iterator[None]:
    """Context in which a Ctrl-C (SIGINT) during an import ends the process with the exit code 130.

    Libraries written in C turn a KeyboardInterrupt in the middle of their import into other errors. At any other moment
    Ctrl-C raises KeyboardInterrupt as usual. Nothing changes outside the main thread, or where Ctrl-C is ignored or has
    a handler of its own.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _handle_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _handle_interrupt(number: int, frame: FrameType | None) -> None:
    """Handles a Ctrl-C: ends the process if `frame` is inside an import, and raises KeyboardInterrupt otherwise."""
    if is_importing(frame):
        # os._exit flushes nothing. RuntimeError: the signal came while the stream was being written.
        with suppress(OSError, RuntimeError):
            flush_output()
        # A chat hides what is typed while it loads.
        restore_terminal()
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt
