"""The vectors of passages: computed once, kept in the cache beside the index of words, and mapped into memory.

The key of the file is a hash of the texts, in their order, and of all files of the sentence model that decide what
vector a text has. Of several processes that need the same file, one makes it and the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from cohort.errors import TaskError
from cohort.tasks.search import kept
from cohort.tasks.search.dense.folder import describe_model, digest_model
from cohort.tasks.search.dense.model import Array
from cohort.tasks.search.dense.processes import embed_passages

# A logger of its own: every command prints what it gets.
log = logging.getLogger("cohort.tasks.progress")

SUFFIX = ".npy"
# Changes when the same model gives the same texts other vectors: files of another version are not used.
_VERSION = "1"


def open_vectors(texts: Sequence[str], folder: Path) -> Array:
    """Returns the vectors of texts, of shape [texts, width], each of length 1, which are made if the cache has none.

    `folder` has the sentence model. The result is in float32 and can only be read. Raises TaskError if the model cannot
    be used, and if the vectors cannot be kept.
    """
    about = describe_model(folder)
    key = _compute_key(texts, digest_model(folder))
    shape = (len(texts), about.width)
    found = _open_kept(key, shape)
    if found is not None:
        return found
    try:
        with _wait_for_turn(key):
            # Another process may have made it meanwhile.
            if _open_kept(key, shape) is None:
                _make_vectors(key, texts, folder, about.width)
        found = _open_kept(key, shape)
    except OSError as error:
        raise _make_error(error.strerror or str(error)) from error
    if found is None:
        raise _make_error("it is damaged or gone as soon as it is written")
    return found


def _make_error(why: str) -> TaskError:
    """Returns the error for vectors that cannot be kept; the caller raises it."""
    return TaskError(
        f"the vectors of the passages cannot be kept in {kept.locate_folder()} ({why}), and computing them for every "
        "process would take too long; make that folder writable, or name another one with the variable COHORT_CACHE"
    )


def _compute_key(texts: Sequence[str], model: str) -> str:
    """Returns 32 hexadecimal digits that depend on the texts, on their order and on the digest of the model."""
    hashed = hashlib.sha256(f"{_VERSION} {model}\n".encode())
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        hashed.update(f"{len(content)} ".encode() + content)
    return hashed.hexdigest()[:32]


def _open_kept(key: str, shape: tuple[int, int]) -> Array | None:
    """Returns the vectors with this key from the cache, mapped into memory; None if there is no undamaged file."""
    # Another process may remove a file between two calls. ValueError: it is no file of numbers.
    with suppress(OSError, ValueError):
        file = kept.find_file(key, SUFFIX)
        found = None if file is None else np.load(file, mmap_mode="r", allow_pickle=False)
        if found is not None and found.shape == shape and found.dtype == np.float32:
            return found
    return None


def _make_vectors(key: str, texts: Sequence[str], folder: Path, width: int) -> None:
    """Computes the vectors of texts and writes them to the cache.

    Raises OSError if they cannot be written, before they are computed where that can be known.
    """

    def write(file: Path) -> None:
        """Writes the vectors to a file."""
        with file.open("wb") as content:
            # Found out now and not at the end: a scoring worker may write only small files.
            content.truncate(4 * len(texts) * width)
            vectors = embed_passages(folder, width, texts)
            content.truncate(0)
            np.save(content, vectors, allow_pickle=False)

    kept.write_file(key, SUFFIX, write)


@contextmanager
def _wait_for_turn(key: str) -> Iterator[None]:
    """Context that only one process of the machine is in at a time, for a key. The kernel frees it if that one ends.

    Raises OSError if the folder cannot be written. Where the file system has no locks, several may be in it.
    """
    folder = kept.locate_folder()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".{key}.lock"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("waiting for another process, which computes the vectors of the same passages")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # A process that still waits for the removed file finds the vectors there when its turn comes.
        file.unlink(missing_ok=True)
        os.close(descriptor)
