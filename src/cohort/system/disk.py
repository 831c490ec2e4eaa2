"""Durable writes: after a kill or a power cut there is the old file or the new one, never a part of one."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cohort.errors import RunError

# Numbers of errors that mean that the disk, or the user's quota, is full, or that writing is not allowed.
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
_HOW_TO_CONTINUE = (
    "then repeat the command, or continue a run that has begun with `cohort resume RUN`; everything written before is "
    "intact."
)


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Turns any OSError inside the block into a RunError that says that `path` cannot be written and what to do.

    `path` is only for the message. Other exceptions pass through.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise RunError(
                f"cannot write {path}: the disk is full or your quota is used up. Free some space, {_HOW_TO_CONTINUE}"
            ) from error
        if error.errno in _NOT_WRITABLE:
            raise RunError(
                f"cannot write {path}: {os.strerror(error.errno).lower()}. Make the file and its directory writable, "
                f"{_HOW_TO_CONTINUE}"
            ) from error
        raise RunError(f"cannot write {path}: {error}. Remove this cause, {_HOW_TO_CONTINUE}") from error


def sync_directory(path: Path) -> None:
    """Makes the names of the files in the directory `path` survive a power cut.

    fsync of a file covers only its content. Raises OSError if this fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Makes the directory `path` and every file and directory under it survive a power cut (fsync).

    Raises OSError if a file cannot be opened. Does nothing if `path` is no directory.
    """
    for folder, _, names in os.walk(path):
        for name in names:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(folder))


def write_atomically(path: Path, data: bytes | str) -> None:
    """Writes a file so that other processes see the old content or the new, never a part. Creates or replaces it.

    The new content survives a power cut once this returns. Text is written as UTF-8. The directory must exist. Raises
    RunError for any OSError, such as a full disk.
    """
    # Beside the target, because a rename is atomic only within a file system.
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_disk_errors(path):
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


def compute_checksum(path: Path) -> str:
    """Returns the CRC-32 of a file's content as 8 hexadecimal digits.

    It finds damage, but does not protect against attacks. Raises OSError if the file cannot be read.
    """
    value = 0
    with open(path, "rb") as file:
        # In pieces of 16 MiB, so that a large file is never held in memory.
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def format_size(num_bytes: int) -> str:
    """Returns a number of bytes as text for people, in units of 1024 up to TB.

    Values below 10 in their unit have one decimal, except bytes.

    >>> format_size(512), format_size(20_480), format_size(3 * 2**30)
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
