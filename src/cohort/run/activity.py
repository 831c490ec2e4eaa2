"""Whether a process works on a run. It is found out without opening the lock: even a look would hold up a start."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.system.json_text import parse_json
from cohort.system.kernel import FileLock, is_process_alive, list_file_locks

_QUIET_SECONDS = 900.0  # without a new step, after which a run on another machine counts as ended
_QUIET_STEPS = 3.0  # or so many times the length of its last step, whichever is longer


@dataclass(frozen=True, kw_only=True, slots=True)
class LockEntry:
    """The process that a lock file names: the one that holds the lock, or that held it last."""

    pid: int
    host: str


class LockMonitor:
    """Tells which runs are under way, from one look at the locks of this machine when it is made."""

    def __init__(self) -> None:
        locks = list_file_locks()
        self.knows_locks = locks is not None  # whether the system lists its locks
        self._locks: dict[int, list[FileLock]] = {}  # by inode
        for lock in locks or ():
            self._locks.setdefault(lock.inode, []).append(lock)
        self._host = socket.gethostname()
        self._now = time.time()

    def is_held(self, run: Path) -> bool:
        """Returns whether a process of this machine holds the lock of the run in the directory `run`.

        Where the system does not list its locks, the process that the lock file names must be alive; it may be another
        one that has got the same number.
        """
        file = f"{run}/.lock"
        if self.knows_locks:
            try:
                about = os.stat(file)
            except OSError:
                return False
            held = self._locks.get(about.st_ino, ())
            if not held or any(lock.device == about.st_dev for lock in held):
                return bool(held)
            # Some file systems have one device number in `stat` and another in the list of locks.
            holder = read_lock_holder(file)
            return holder is not None and any(lock.pid == holder.pid for lock in held)
        holder = read_lock_holder(file)
        return holder is not None and holder.host == self._host and is_process_alive(holder.pid)

    def may_be_elsewhere(self, run: Path, step_seconds: float) -> bool:
        """Returns whether a process of another machine may work on a run: it was the last, and has written lately.

        `step_seconds` is how long the last step of the run took; NaN = not known.
        """
        holder = read_lock_holder(f"{run}/.lock")
        return holder is not None and holder.host != self._host and self._has_written_lately(run, step_seconds)

    def _has_written_lately(self, run: Path, step_seconds: float) -> bool:
        """Returns whether run.db or its log was written within the time that a step may take."""
        # False for NaN.
        quiet = _QUIET_STEPS * step_seconds if step_seconds * _QUIET_STEPS > _QUIET_SECONDS else _QUIET_SECONDS
        return any(self._now - written < quiet for written in _list_write_times(run))


def read_lock_holder(file: str) -> LockEntry | None:
    """Returns the process that a lock file names; None if it names none or cannot be read."""
    try:
        # Reading a pipe would wait for a writer that may never come.
        if not stat.S_ISREG(os.stat(file).st_mode):
            return None
        with open(file, "rb") as opened:
            content: Any = parse_json(opened.read(4096))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    pid = content.get("pid")
    host = content.get("host")
    if type(pid) is not int or not 0 < pid < 1 << 31 or not isinstance(host, str):
        return None
    return LockEntry(pid=pid, host=host)


def _list_write_times(run: Path, names: Sequence[str] = ("run.db", "run.db-wal")) -> list[float]:
    """Returns when those of the files `names` that exist were last written, in seconds since 1970."""
    times = []
    for name in names:
        try:
            times.append(os.stat(f"{run}/{name}").st_mtime)
        except OSError:
            continue
    return times
