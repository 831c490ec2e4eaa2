"""Folders that appear complete or not at all, and locks that the kernel frees, even if the process is killed."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from cohort.errors import ModelError
from cohort.system.disk import sync_directory, sync_tree


@contextmanager
def stage_folder(out: Path) -> Iterator[Path]:
    """Yields a temporary folder to write into. It becomes `out` by one rename when the block ends without an error.

    Raises ModelError if `out` is not empty or cannot be written. An OSError in the block becomes a ModelError too, and
    so does an error of the library safetensors. After an error in the block, the temporary folder is removed and `out`
    is unchanged. The parents of `out` are created. If `out` is a symbolic link, it stays, and the folder that it points
    to is written. Temporary folders that killed processes left beside `out` are removed.
    """
    out = Path(os.path.realpath(out))
    if out.exists() and not out.is_dir():
        raise ModelError(f"{out} exists and is not a folder: delete it, or choose another folder to write")
    if out.exists() and any(out.iterdir()):
        raise ModelError(f"{out} exists and is not empty: delete it, or choose another folder to write")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        aside, lock = _make_locked_folder(out)
    except OSError as e:
        raise ModelError(
            f"cannot write {out}: {e.strerror}; make {out.parent} a folder you can write to, or choose another place "
            "(for `cohort pull`: set COHORT_CACHE)"
        ) from e
    try:
        yield aside
        # mkdtemp makes the folder private and the safetensors writer makes its files private. Give usual permissions.
        aside.chmod(0o777 & ~_read_umask())
        for file in aside.iterdir():
            file.chmod(0o666 & ~_read_umask())
        # On disk before the rename: after a power cut the folder is complete or absent.
        sync_tree(aside)
        aside.rename(out)
        sync_directory(out.parent)
    except (OSError, SafetensorError) as e:
        # The library has no error numbers: its text tells the system's reason.
        if getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC}" in str(e):
            raise ModelError(
                f"cannot write {out}: the disk is full or your quota is used up; free some space, then run the command "
                "again"
            ) from e
        raise ModelError(
            f"cannot write {out}: {getattr(e, 'strerror', None) or e}; check the disk, or choose another place "
            "(for `cohort pull`: set COHORT_CACHE)"
        ) from e
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


def _make_locked_folder(out: Path) -> tuple[Path, int]:
    """Makes a temporary folder beside `out` and locks it. Returns it with the open descriptor that holds the lock.

    The lock tells `_remove_leftovers` of other processes that the writer lives. The kernel frees it when the writer
    ends, however it ends. Raises OSError if the folder cannot be made.
    """
    while True:
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.writing-", dir=out.parent))
        # Another process may take the folder for a leftover before it is locked. Then another one is made.
        try:
            descriptor = os.open(aside, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if _try_lock(descriptor) != "held" and aside.exists():
            return aside, descriptor
        os.close(descriptor)


def _remove_leftovers(out: Path) -> None:
    """Removes the temporary folders beside `out` that killed processes left behind while they wrote `out`.

    Folders that a living process writes are locked, and stay.
    """
    for aside in out.parent.glob(f".{glob.escape(out.name)}.writing-*"):
        try:
            descriptor = os.open(aside, os.O_RDONLY)
        except OSError:
            continue
        if _try_lock(descriptor) == "locked":
            shutil.rmtree(aside, ignore_errors=True)
        os.close(descriptor)


def _try_lock(descriptor: int) -> Literal["locked", "held", "unknown"]:
    """Locks an open folder. Returns "locked", "held" if another process has the lock, or "unknown".

    "unknown" = the file system cannot lock folders, as some on networks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError:
        return "unknown"
    return "locked"


@contextmanager
def hold_lock(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds an exclusive lock on the file `path` during the block. The file is created if needed, and is not removed.

    If the lock is held already, calls `waiting` once, to tell the user, and then waits for the lock. Raises ModelError
    if the file cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")  # noqa: SIM115 closed below, after the wait
    except OSError as e:
        raise ModelError(
            f"cannot lock {path}: {e.strerror}; set the environment variable COHORT_CACHE to a folder you can write to"
        ) from e
    # The kernel frees the lock when the file is closed, at the latest when the process dies.
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_umask() -> int:
    """Returns the process's umask: the permissions that new files do not get. It is set for a moment and restored."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
