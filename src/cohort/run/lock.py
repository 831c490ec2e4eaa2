"""An exclusive lock on a run. The kernel frees it when the process that holds it ends, however it ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import datetime
from pathlib import Path

from cohort.errors import RunError
from cohort.system.disk import explain_disk_errors
from cohort.system.json_text import parse_json


class Lock:
    """A lock (`flock`) on a file. The file's content names the process that holds it, or that held it last."""

    def __init__(self, path: Path, what: str = "run") -> None:
        self.path = path
        self._what = what  # the kind of thing that is locked, for the error
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def acquire(self) -> None:
        """Takes the lock, unless this object holds it already.

        Does not wait: raises RunError if another process, or another object of this process, holds it. Also raises
        RunError if the file cannot be written.
        """
        if self.is_held:
            return
        with explain_disk_errors(self.path):
            # O_CLOEXEC: a program that this process starts would otherwise inherit the lock and outlive this process.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _describe_holder(os.pread(descriptor, 4096, 0))
            os.close(descriptor)
            raise RunError(
                f"the {self._what} {self.path.parent} is being written by {holder}. Wait until that process ends, or "
                "stop it; then repeat the command."
            ) from None
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        with explain_disk_errors(self.path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Frees the lock, if this object holds it. The lock file stays."""
        # The file stays: removing it would let a third process lock a name that a second still waits on.
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _describe_holder(content: bytes) -> str:
    """Returns which process holds the lock, like "process 12 on HOST since TIME", from the content of the lock file.

    "another process" if the content cannot be read.
    """
    try:
        holder = parse_json(content)
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
