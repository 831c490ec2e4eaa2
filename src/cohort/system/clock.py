"""Where a step's time goes: a decorator on the stage functions, so that the loop stays free of timers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_seconds: dict[str, float] = {}


def stage(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Add the time spent in the decorated function to the stage `name`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                _seconds[name] = _seconds.get(name, 0.0) + time.perf_counter() - begin

        return timed

    return decorate


def add(seconds: Mapping[str, float]) -> None:
    """Add times that were taken elsewhere, perhaps in another process."""
    for name, spent in seconds.items():
        _seconds[name] = _seconds.get(name, 0.0) + spent


def read_and_reset() -> dict[str, float]:
    """Seconds by stage since the last call."""
    seconds = dict(_seconds)
    _seconds.clear()
    return seconds
