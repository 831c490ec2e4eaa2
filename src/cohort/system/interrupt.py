"""Ctrl-C as a flag: it asks to stop what is under way, and does not end the program."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

INSISTENT = 3  # Ctrl-C so often in one context ends the program, in case the flag is not looked at


class InterruptFlag:
    """Inside its context, Ctrl-C sets `is_set` and raises nothing, so that nothing is left half done.

    The third Ctrl-C raises KeyboardInterrupt. Outside the main thread nothing is installed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._former: Any = None

    @property
    def is_set(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self.count > 0

    @property
    def is_insistent(self) -> bool:
        """Whether Ctrl-C was pressed so often that it has raised KeyboardInterrupt."""
        return self.count >= INSISTENT

    def __enter__(self) -> InterruptFlag:
        self.count = 0
        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGINT, self._handle_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)
            self._former = None

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Counts a Ctrl-C, and raises KeyboardInterrupt at the third."""
        self.count += 1
        if self.is_insistent:
            raise KeyboardInterrupt
