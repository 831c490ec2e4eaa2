"""Stopping a run by signals: the first one lets the step finish, the second one interrupts at once."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class StopSignals:
    """Between `install` and `restore`, Ctrl-C, SIGTERM or SIGHUP sets `requested`; a second one interrupts at once.

    A signal that is ignored stays ignored, as SIGHUP under nohup, except Ctrl-C. Outside the main thread nothing is
    installed, because Python allows handlers only there.
    """

    def __init__(self) -> None:
        self.requested = ""  # the name of the first signal; "" = none came
        self._former: dict[signal.Signals, Any] = {}
        self._is_silent = False

    def install(self, silent: bool = False) -> None:
        """Replaces the handlers of SIGINT (Ctrl-C), SIGTERM and SIGHUP by one that asks the run to stop.

        Does nothing outside the main thread. A signal that the process ignores stays ignored, except SIGINT. `silent` =
        another rank tells the user.
        """
        self._is_silent = silent
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (getattr(signal, name) for name in _STOP_SIGNALS if hasattr(signal, name)):
            former = signal.getsignal(number)
            # Ctrl-C is handled also if it is ignored, as it is in the background jobs of a shell script.
            if former is not signal.SIG_IGN or number == signal.SIGINT:
                self._former[number] = former
                signal.signal(number, self._handle_signal)

    def restore(self) -> None:
        """Puts the signal handlers back that `install` replaced."""
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former.clear()

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Handles a stop signal: stores the name of the first in `requested`, raises KeyboardInterrupt at a second.

        At the first it also tells the user, on stderr, that the run will stop after this step.
        """
        if self.requested:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
        if self._is_silent:
            return
        # Not `print`: the signal may have interrupted one. The terminal may also be gone.
        with suppress(OSError):
            os.write(2, b"\nfinishing this step, then saving; a second signal stops at once\n")
