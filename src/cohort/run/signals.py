"""Stopping politely: the first signal asks, the second insists."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

_ASKING = ("SIGINT", "SIGTERM", "SIGHUP")


class StopSignals:
    """From `install` to `restore`, Ctrl-C, SIGTERM and SIGHUP set `requested`; a second interrupts at once.

    SIGHUP stays ignored where it is ignored (nohup). Outside the main thread nothing is installed, because
    Python allows it only there.
    """

    def __init__(self) -> None:
        self.requested = ""  # name of the signal, once one came
        self._former: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (getattr(signal, name) for name in _ASKING if hasattr(signal, name)):
            former = signal.getsignal(number)
            if former is not signal.SIG_IGN or number == signal.SIGINT:
                self._former[number] = former
                signal.signal(number, self._handle)

    def restore(self) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
        with suppress(OSError):  # not print: the signal may come in the middle of one, or of a terminal that is gone
            os.write(2, b"\nfinishing this step, then saving; once more stops at once\n")
