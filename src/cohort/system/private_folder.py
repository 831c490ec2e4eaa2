"""Folders for one program alone, in shared memory or among temporary files, which vanish with the program.

Each has a janitor: a small process that removes the folder when the program is gone, killed by SIGKILL too. What a
janitor that was killed itself has left, the next program removes that makes such a folder.
`python -m cohort.system.private_folder FOLDER PROGRAM` is the janitor.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cohort.system.kernel import find_shared_memory

# Others may use shared memory too, and a full one kills processes: this share of what is free stays free.
FREE_SHARE = 0.1
# How often a janitor looks whether its program lives. It learns of most ends at once, because its input ends. This is
# for forks of the program, which may hold the pipe open when the program is gone.
WATCH_SECONDS = 0.5
LOCK = "lock"  # a file that the program holds locked: the kernel frees it when the program is gone
NEW_SECONDS = 60.0  # for which a folder counts as new, so that its lock may not be held yet


@dataclass(kw_only=True, slots=True)
class PrivateFolder:
    """A folder that only this user can read, and the janitor that outlives this process to remove it."""

    path: Path
    janitor: subprocess.Popen[bytes]
    lock: int  # file descriptor

    @classmethod
    def create(cls, purpose: str, num_bytes: int, parent: Path | None = None) -> Self:
        """Makes a folder for `num_bytes` of files. `purpose` is a word for its name.

        It is made in `parent`; None = in shared memory if that has room, else among temporary files. Raises OSError.
        """
        if parent is None:
            parent = find_shared_memory(int(num_bytes / (1 - FREE_SHARE))) or Path(tempfile.gettempdir())
        prefix = f"cohort-{purpose}-"
        _remove_abandoned(parent, prefix)
        # mkdtemp makes it with the mode 0700.
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            janitor = subprocess.Popen(
                [sys.executable, "-P", "-m", "cohort.system.private_folder", str(path), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ctrl-C on a terminal reaches all processes of the session.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            )
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return cls(path=path, janitor=janitor, lock=lock)

    def close(self) -> None:
        """Removes the folder, and ends the janitor."""
        shutil.rmtree(self.path, ignore_errors=True)
        assert self.janitor.stdin is not None
        with suppress(OSError):
            self.janitor.stdin.close()
        self.janitor.wait()
        os.close(self.lock)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes folders of this user in `parent` whose program is gone. Their names begin with `prefix`."""
    for path in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            status = path.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_ctime < NEW_SECONDS:
                continue
            lock = os.open(path / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def clean_up(path: Path, program: int) -> None:
    """Waits until standard input ends or the process `program` is gone, and removes the folder."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    # The parent of this process changes when the program ends.
    while not poll.poll(WATCH_SECONDS * 1000) and os.getppid() == program:
        pass
    shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    clean_up(Path(sys.argv[1]), int(sys.argv[2]))
