"""Signals that end a program in order: what is under way is stopped, and the terminal is left as it was found.

Windows has no termios. It is imported where it is used, so that the command can tell its users so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

_END_SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT")
_SHOW_CURSOR = b"\x1b[?25h"
_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"  # the file that Python names for the functions that import a module
_kept: list[Any] = []  # settings of the terminal that `restore_terminal` brings back; empty = it leaves them alone


class EndSignals:
    """Inside its context, SIGTERM, SIGHUP or SIGQUIT raises SystemExit with the exit code 128 + its number.

    Inside `hold` it only sets `code`, so that nothing is left half done. A second signal ends the process at once, and
    so does one while a module is imported; the terminal is restored then too. A signal that the process ignores stays
    ignored, as SIGHUP under nohup. Outside the main thread nothing is installed.
    """

    def __init__(self) -> None:
        self.code = 0  # the exit code after a signal; 0 = none came
        self._is_held = False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> EndSignals:
        import termios

        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(termios.error, OSError, ValueError):
                _kept[:] = termios.tcgetattr(sys.stdin.fileno())
            for number in (signal.Signals[name] for name in _END_SIGNALS):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._handle_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former.clear()
        _kept.clear()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Context in which the first signal raises nothing. The caller looks at `code`, and stops what it does."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def leave(self) -> None:
        """Raises SystemExit if a signal came that was held."""
        if self.code:
            raise SystemExit(self.code)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: stores the exit code of the first and raises SystemExit, or ends the process at once."""
        # Libraries written in C turn an exception in the middle of their import into other errors.
        if self.code or is_importing(frame):
            restore_terminal()
            os._exit(128 + number)
        self.code = 128 + number
        _replace_lost_terminal()
        if not self._is_held:
            raise SystemExit(self.code)


def is_importing(frame: FrameType | None) -> bool:
    """Returns whether an import is under way in this frame or in one of its callers."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False


def restore_terminal() -> None:
    """Gives the terminal the settings from before `EndSignals`, and shows its cursor. For a process that ends at once.

    Does nothing outside the context of `EndSignals`, and without a terminal.
    """
    if not _kept:
        return
    import termios

    # The terminal may be gone, or standard input was closed.
    with contextlib.suppress(termios.error, OSError, ValueError):
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, _kept)
        if os.isatty(1) and os.environ.get("TERM", "dumb") != "dumb":
            os.write(1, _SHOW_CURSOR)


def _replace_lost_terminal() -> None:
    """Puts /dev/null in the place of a terminal that is gone, as after SIGHUP, so that writing to it does not fail."""
    import termios

    for descriptor in (0, 1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            # A stream that never was a terminal has another error.
            if error.args[0] == errno.EIO:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, descriptor)
                os.close(null)
