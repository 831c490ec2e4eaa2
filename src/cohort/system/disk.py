"""Writing so that a kill or a power cut leaves the old file or the new one, never half of one."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cohort.errors import RunError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the file system says about `path` into one line with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            problem = "the disk is full: free some space, then resume; everything written before is intact"
        elif error.errno in _DENIED:
            problem = f"{os.strerror(error.errno).lower()}: make the directory writable or use another one"
        else:
            problem = f"{error.strerror or error}; everything written before is intact"
        raise RunError(f"cannot write {path}: {problem}.") from error


def sync_directory(path: Path) -> None:
    """Make the names inside a directory durable: fsync of a file does not cover its own name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Make every file and directory under `path` durable."""
    for folder, _, names in os.walk(path):
        for name in names:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(folder))


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file that other processes see whole or not at all, durable when this returns."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            with open(aside, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def checksum(path: Path) -> str:
    """CRC-32 of a file: finds damage, at memory speed; it is no defence against an adversary."""
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def readable_size(num_bytes: int) -> str:
    """A size for people.

    >>> readable_size(512), readable_size(20_480), readable_size(3 * 2**30)
    ('512 B', '20 KB', '3.0 GB')
    """
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("KB", "MB", "GB", "TB"):
        size /= 1024
        if size < 1024 or unit == "TB":
            break
    return f"{size:.1f} {unit}" if size < 10 else f"{size:.0f} {unit}"
