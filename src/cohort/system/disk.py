"""Durable writes: after a kill or a power cut there is the old file or the new one, never a part of one."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from cohort.errors import RunError

# Numbers of errors that mean that the disk, or the user's quota, is full, or that writing is not allowed.
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
# How file systems without fsync of directories refuse it, as some network and FUSE file systems do.
_NOT_FOR_DIRECTORIES = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_HOW_TO_CONTINUE = (
    "then repeat the command, or continue a run that has begun with `cohort resume RUN`; everything written before is "
    "intact."
)


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Turns any OSError inside the block into a RunError that says that `path` cannot be written and what to do.

    `path` is only for the message. Other exceptions pass through, and so does BrokenPipeError: the reader of a pipe has
    left, which is nothing to repair.
    """
    try:
        yield
    except BrokenPipeError:
        raise
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


def sync_file(descriptor: int) -> None:
    """Makes what was written to an open file survive a power cut. Raises OSError if this fails."""
    # On macOS fsync leaves the data in the memory of the drive. Some file systems there lack the full call.
    if hasattr(fcntl, "F_FULLFSYNC"):
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Makes the names of the files in the directory `path` survive a power cut.

    fsync of a file covers only its content. Raises OSError if this fails. Does nothing on a file system that cannot do
    it for directories.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_file(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_DIRECTORIES:
            raise
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
                sync_file(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(folder))


def write_atomically(path: Path, data: bytes | str) -> None:
    """Writes a file so that other processes see the old content or the new, never a part. Creates or replaces it.

    The new content survives a power cut once this returns. Text is written as UTF-8. The directory must exist. What is
    not a regular file is written through, as `open_replacement` says. Raises RunError for any OSError, such as a full
    disk.
    """
    with open_replacement(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def open_replacement(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write the new content of `path` into. It replaces the old content when the block ends.

    If the block raises, the old content stays. A symbolic link stays too: the file that it points to is replaced, or
    made. A device, a pipe or standard output cannot be replaced, so the block writes straight into it. Raises RunError
    for any OSError, such as a full disk; only BrokenPipeError passes through.
    """
    with explain_disk_errors(path):
        if is_standard_output(path):
            # What was printed comes first. The copy may be closed, standard output may not.
            sys.stdout.flush()
            with os.fdopen(os.dup(1), "wb") as file:
                yield file
        elif path.exists() and not path.is_file():
            with open(path, "wb") as file:
                yield file
        else:
            yield from _replace_regular_file(Path(os.path.realpath(path)))


def _replace_regular_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a temporary file beside `path`, then makes it durable and renames it to `path`.

    `path` is absolute and no symbolic link. An error removes the temporary file and is raised again.
    """
    # Beside the target, because a rename is atomic only within a file system.
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            sync_file(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def is_standard_output(path: Path) -> bool:
    """Returns whether `path` is the file, terminal or pipe that this process's standard output goes to.

    /dev/stdout is one such path. False if there is no such file, or standard output is closed.
    """
    try:
        return os.path.samestat(os.stat(path), os.fstat(1))
    except OSError:
        return False


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
