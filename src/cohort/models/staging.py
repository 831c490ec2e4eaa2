"""Folders that appear complete or not at all, and locks that the kernel frees, even if the process is killed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cohort.errors import ModelError
from cohort.system.disk import sync_directory, sync_tree


@contextmanager
def stage_folder(out: Path) -> Iterator[Path]:
    """Yields a temporary folder to write into. It becomes `out` by one rename when the block ends without an error.

    Raises ModelError if `out` is not empty or cannot be written. An OSError in the block becomes a ModelError too.
    After an error in the block, the temporary folder is removed and `out` is unchanged. The parents of `out` are
    created.
    """
    out = Path(os.path.abspath(out))
    if out.exists() and not out.is_dir():
        raise ModelError(f"{out} exists and is not a folder: delete it, or choose another folder to write")
    if out.exists() and any(out.iterdir()):
        raise ModelError(f"{out} exists and is not empty: delete it, or choose another folder to write")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.writing-", dir=out.parent))
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
    except OSError as e:
        if e.errno == errno.ENOSPC:
            raise ModelError(
                f"cannot write {out}: the disk is full; free some space, then run the command again"
            ) from e
        raise ModelError(
            f"cannot write {out}: {e.strerror or e}; check the disk, or choose another place "
            "(for `cohort pull`: set COHORT_CACHE)"
        ) from e
    finally:
        shutil.rmtree(aside, ignore_errors=True)


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


def remove_leftovers(out: Path) -> None:
    """Removes the temporary folders that killed processes left behind while they were in `stage_folder(out)`.

    The caller must hold a lock that excludes other writers of `out`.
    """
    for aside in out.parent.glob(f".{out.name}.writing-*"):
        shutil.rmtree(aside, ignore_errors=True)


def _read_umask() -> int:
    """Returns the process's umask: the permissions that new files do not get. It is set for a moment and restored."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
