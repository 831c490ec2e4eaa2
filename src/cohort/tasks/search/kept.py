"""Files that a search keeps in the cache: the index of words, and vectors.

A file is `search/KEY-DIGEST.SUFFIX`. KEY is a hash of what it was made of, so that other passages never meet an old
file. DIGEST is a hash of the file itself: a file that was damaged has another one, and is made anew. A file is written
aside and renamed when it is complete, and then only read, so that any number of processes may make and open the same
one at the same time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cohort.system.cache import cache_root
from cohort.system.disk import sync_directory, sync_file

log = logging.getLogger(__name__)


def locate_folder() -> Path:
    """Returns the absolute path of the folder of these files. It need not exist."""
    return cache_root().absolute() / "search"


def find_file(key: str, suffix: str) -> Path | None:
    """Returns the path of the undamaged file with this key and suffix (".db"); None if there is none.

    A damaged one is removed if that is possible.
    """
    # Another process may remove a file between two calls.
    with suppress(OSError):
        for file in sorted(locate_folder().glob(f"{key}-*{suffix}")):
            if file.stem.removeprefix(f"{key}-") == _digest(file):
                return file
            log.warning("the file %s is damaged and is made anew", file)
            # Processes that have it open keep it.
            file.unlink(missing_ok=True)
    return None


def write_file(key: str, suffix: str, write: Callable[[Path], None]) -> None:
    """Makes the file with this key and suffix, complete or not at all. `write` writes it to the path that it is given.

    Raises OSError if it cannot be written, and what `write` raises.
    """
    folder = locate_folder()
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{key}.{os.getpid()}.{threading.get_ident()}.tmp"
    aside.unlink(missing_ok=True)
    try:
        write(aside)
        with aside.open("rb") as content:
            sync_file(content.fileno())
        aside.replace(folder / f"{key}-{_digest(aside)}{suffix}")
        sync_directory(folder)
    finally:
        aside.unlink(missing_ok=True)


def _digest(file: Path) -> str:
    """Returns 16 hexadecimal digits of a hash of the file's content. Raises OSError if it cannot be read."""
    # Not the digests that are remembered for untouched files: they would miss damage of the disk.
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]
