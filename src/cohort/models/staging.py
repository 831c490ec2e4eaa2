"""Folders and locks that survive being killed: a folder is whole or absent, a lock is freed by the kernel."""

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
def staged(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` by one rename when the block ends without an error."""
    out = Path(os.path.abspath(out))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists and is not empty: choose another folder or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.writing-", dir=out.parent))
    except OSError as e:
        raise ModelError(f"cannot write {out}: {e.strerror}") from e
    try:
        yield aside
        aside.chmod(0o777 & ~_umask())  # mkdtemp makes it private, and the safetensors writer its files
        for file in aside.iterdir():
            file.chmod(0o666 & ~_umask())
        sync_tree(aside)
        aside.rename(out)
        sync_directory(out.parent)
    except OSError as e:
        full = " (the disk is full)" if e.errno == errno.ENOSPC else ""
        raise ModelError(f"cannot write {out}: {e.strerror or e}{full}") from e
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock file `path`; call `waiting` once if another process has it, then wait for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")  # noqa: SIM115 closed below, after the wait
    except OSError as e:
        raise ModelError(f"cannot lock {path}: {e.strerror}") from e
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def clear_leftovers(out: Path) -> None:
    """Remove what a killed `staged(out)` left. Only for who holds a lock on `out`."""
    for aside in out.parent.glob(f".{out.name}.writing-*"):
        shutil.rmtree(aside, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
