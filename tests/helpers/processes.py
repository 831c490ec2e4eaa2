"""Looks at processes of a run from outside: its descendants, and whether they have ended."""

from __future__ import annotations

import time
from pathlib import Path

from cohort.system.kernel import list_children

# All processes of a run must have ended within that time, in seconds.
PATIENCE = 30.0


def list_family(pid: int) -> list[int]:
    """Returns the process ids of all descendants of a process."""
    children = list_children(pid)
    return [*children, *(other for child in children for other in list_family(child))]


def wait_until_gone(family: list[int]) -> float:
    """Waits until these processes have ended, and returns the seconds that it took."""
    begin = time.monotonic()
    while alive := [pid for pid in family if Path(f"/proc/{pid}/cmdline").exists() and _is_running(pid)]:
        assert time.monotonic() - begin < PATIENCE, f"{alive} are still there"
        time.sleep(0.05)
    return time.monotonic() - begin


def _is_running(pid: int) -> bool:
    """Returns whether a process is neither gone nor waits to be noticed by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
