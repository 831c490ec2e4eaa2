"""Digests of files: hashes of every byte, which a cache remembers as long as a file is untouched.

The cache is the folder `digests` in the user's cache folder, with one small file per digested file. It only saves time:
an entry that is missing, damaged or cannot be written changes no digest.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cohort.errors import RunError
from cohort.system.cache import cache_root
from cohort.system.disk import write_atomically
from cohort.system.json_text import parse_json

# A file that was changed less than so many seconds ago may change again without a new time: clocks of file systems tick
# coarsely (FAT: every 2 s). Its digest is not remembered.
MIN_AGE_SECONDS = 2.0
# Shards of a model are hashed at the same time. One thread hashes about 1.8 GB/s.
MAX_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FileState:
    """What a file has as long as it is not touched."""

    path: str
    size: int
    mtime_ns: int
    # The time of the last change of any kind. Unlike the time of modification, no program can set it back.
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def read(cls, path: Path) -> FileState:
        """Reads the state of the file at the absolute path `path`. Raises OSError if there is none."""
        facts = path.stat()
        return cls(
            path=str(path),
            size=facts.st_size,
            mtime_ns=facts.st_mtime_ns,
            ctime_ns=facts.st_ctime_ns,
            inode=facts.st_ino,
            device=facts.st_dev,
        )

    @property
    def age(self) -> float:
        """Seconds since the last change; negative if the file's times lie in the future."""
        return time.time() - max(self.mtime_ns, self.ctime_ns) / 1e9


def digest_file(path: Path) -> str:
    """Returns the SHA-256 of a file's content as 64 hexadecimal digits. Every byte counts.

    The digest of a file that was not touched since it was last digested is read from the cache. Raises OSError if the
    file cannot be read.
    """
    path = path.resolve()
    before = FileState.read(path)
    known = _recall_digest(before)
    if known is not None:
        return known
    # Taken before the file is read: a file that has changed since then is not old enough.
    is_settled = before.age >= MIN_AGE_SECONDS
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if is_settled and FileState.read(path) == before:
        _remember_digest(before, digest)
    return digest


def digest_files(files: Mapping[str, Path]) -> str:
    """Returns 16 hexadecimal digits of a hash over the names, which are the keys, and the contents of `files`.

    Their order and their places do not matter. Every byte does. Raises OSError if one of them cannot be read.
    """
    names = sorted(files)
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        digests = pool.map(digest_file, (files[name] for name in names))
        lines = [f"{name} {digest}\n" for name, digest in zip(names, digests, strict=True)]
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


def _recall_digest(state: FileState) -> str | None:
    """Returns the digest that the cache has for a file; None if it has none, or one of a file that has changed."""
    try:
        line, _, checksum = _locate_entry(state).read_text(encoding="utf-8").partition("\n")
        entry = parse_json(line)
        is_usable = checksum == _checksum(line) and entry["file"] == asdict(state)
        return str(entry["sha256"]) if is_usable else None
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):
        return None


def _remember_digest(state: FileState, digest: str) -> None:
    """Writes the digest of a file to the cache. Does nothing if the cache cannot be written."""
    line = json.dumps({"file": asdict(state), "sha256": digest})
    # RuntimeError: there is no home folder.
    with suppress(OSError, RunError, RuntimeError):
        entry = _locate_entry(state)
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(entry, f"{line}\n{_checksum(line)}")


def _locate_entry(state: FileState) -> Path:
    """Returns the path of the cache's file about a file. It need not exist."""
    name = hashlib.sha256(state.path.encode(errors="surrogateescape")).hexdigest()[:32]
    return cache_root() / "digests" / f"{name}.json"


def _checksum(line: str) -> str:
    """Returns 16 hexadecimal digits that show whether a line of the cache is as it was written."""
    return hashlib.sha256(line.encode()).hexdigest()[:16]
