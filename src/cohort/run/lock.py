"""An exclusive lock on a run that the kernel frees when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import datetime
from pathlib import Path

from cohort.errors import RunError
from cohort.system.disk import disk_errors


class Lock:
    """`flock` on a file that says who holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the lock, or raise an error that names its holder. Taking it twice is the same as once."""
        if self.held:
            return
        with disk_errors(self.path):
            # Not inherited by programs this process starts: they would keep the lock after its death.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _describe(os.pread(descriptor, 4096, 0))
            os.close(descriptor)
            raise RunError(
                f"{self.path.parent} is being written by {holder}: wait for it, stop it, or use another run."
            ) from None
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        with disk_errors(self.path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        # The file stays: removing it would let a third process lock a name that a second still waits on.
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _describe(content: bytes) -> str:
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
