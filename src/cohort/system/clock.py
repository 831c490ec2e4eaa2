"""Measures how long each stage of a step takes. A decorator on functions keeps the training loop free of timers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Seconds by stage since the last `read_and_reset`. Names with a slash are of what happens within a stage: seconds that
# are part of it, and counts that depend on time as these do. One dict per process.
_seconds: dict[str, float] = {}


def stage(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that adds the seconds spent in each call of a function to the stage `name`, as a sum.

    Calls that raise count too. `read_and_reset` returns the sums of this process. Of nested stages, the outer one
    includes the time of the inner one.
    """

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


def add_seconds(seconds: Mapping[str, float]) -> None:
    """Adds seconds, by name of the stage, to the sums of this process.

    They were measured elsewhere, for example in the process of a learner.
    """
    for name, spent in seconds.items():
        _seconds[name] = _seconds.get(name, 0.0) + spent


def add_count(name: str) -> None:
    """Counts one more event of this name, such as "scoring/retries"."""
    _seconds[name] = _seconds.get(name, 0.0) + 1.0


def read_and_reset() -> dict[str, float]:
    """Returns the seconds spent in this process since the last call, by name of the stage, and starts again at 0.

    Counts of events are in it too, by names with a slash. What did not happen is not in it.
    """
    seconds = dict(_seconds)
    _seconds.clear()
    return seconds
