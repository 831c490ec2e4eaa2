"""Processes that turn texts into vectors, each with one thread.

The libraries of arithmetic read how many threads they may use when a process starts, and a process that trains has
several. Threads that share a busy machine make small products ten times slower, and their number may change the last
bits. So vectors are computed in processes of their own: one per core for passages, one for queries. Where a process has
one thread anyway, as scoring workers have, it computes the vectors of queries itself.

A process reads requests from its standard input, one per line, and answers with the numbers of the vectors, as bytes.
It ends when its input ends, and so with the process that started it, however that ends.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from cohort.errors import CohortError, TaskError
from cohort.system.json_text import parse_json
from cohort.system.kernel import count_cores
from cohort.system.process import THREAD_VARIABLES, describe_exit
from cohort.tasks.search.dense.folder import Kind
from cohort.tasks.search.dense.model import Array, SentenceModel

# A logger of its own: every command prints what it gets.
log = logging.getLogger("cohort.tasks.progress")

MAX_PROCESSES = 16
MIN_PASSAGES = 64  # of one process: starting it takes as long as embedding that many
CHUNK = 16  # passages of one request
END_SECONDS = 5.0  # for a process that has closed its output to end
NOTE_SECONDS = 10.0  # between two notes about the progress


class QueryEmbedder(Protocol):
    """What turns queries into vectors."""

    def embed_query(self, query: str) -> Array:
        """Returns the vector of a query, of shape [width] and of length 1."""


class OwnEmbedder:
    """Computes the vectors of queries in this process. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        self._model = SentenceModel(folder)
        self._lock = threading.Lock()

    def embed_query(self, query: str) -> Array:
        """Returns the vector of a query, of shape [width] and of length 1."""
        with self._lock:
            return self._model.embed(query, "query")


class EmbeddingProcess:
    """A process that turns texts into vectors. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        """Starts the process, which then loads the model."""
        self._lock = threading.Lock()
        self._width = 0  # of the vectors; 0 = the process was not ready yet
        # What the process prints, for the message about its end.
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        source = str(Path(__file__).resolve().parents[4])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            # Interrupts from the keyboard are for the process that reads the vectors.
            start_new_session=True,
            env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), "PYTHONSAFEPATH": "1", "PYTHONPATH": path},
        )
        atexit.register(self.close)

    def wait_until_ready(self) -> None:
        """Waits until the process has loaded the model. Raises TaskError if it cannot, or ends."""
        with self._lock:
            self._read_hello()

    def _read_hello(self) -> None:
        """Reads the first message of the process, if it was not read yet. The caller holds the lock."""
        if self._width:
            return
        assert self._process.stdout is not None
        try:
            line = self._process.stdout.readline()
        # ValueError: it was closed.
        except (OSError, ValueError):
            line = b""
        if not line.endswith(b"\n"):
            raise self._explain_end()
        hello: dict[str, Any] = parse_json(line)
        if "error" in hello:
            self.close()
            raise TaskError(hello["error"])
        self._width = hello["width"]

    def embed_query(self, query: str) -> Array:
        """Returns the vector of a query, of shape [width] and of length 1."""
        vector: Array = self.embed([query], "query")[0]
        return vector

    def embed(self, texts: Sequence[str], kind: Kind) -> Array:
        """Returns the vectors of texts, each computed alone, of shape [texts, width].

        Raises TaskError if the process cannot load the model, or ends.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._read_hello()
            size = 4 * self._width * len(texts)
            try:
                self._process.stdin.write(json.dumps({"kind": kind, "texts": list(texts)}).encode() + b"\n")
                self._process.stdin.flush()
                content = self._process.stdout.read(size)
            # ValueError: it was closed.
            except (OSError, ValueError):
                content = b""
        if len(content) < size:
            raise self._explain_end()
        return np.frombuffer(content, np.float32).reshape(len(texts), self._width)

    def _explain_end(self) -> TaskError:
        """Returns the error for a process that has ended; the caller raises it."""
        # It may have closed its output just before it ends: then its own exit code tells more than that of `close`.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.close()
        self._printed.seek(0)
        lines = self._printed.read().decode(errors="replace").strip().splitlines()
        last = f" ({lines[-1][:200]})" if lines else ""
        return TaskError(
            f"a process that computes vectors of texts {describe_exit(self._process.returncode)}{last}; each needs as "
            "much memory as its sentence model has. Repeat the command, with more free memory if that was why"
        )

    def close(self) -> None:
        """Ends the process."""
        atexit.unregister(self.close)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        # Without its pipes it ends by itself, but perhaps not while it computes.
        self._process.kill()
        self._process.wait()


def is_single_threaded() -> bool:
    """Returns whether this process was started with one thread for arithmetic."""
    return all(os.environ.get(name) == "1" for name in THREAD_VARIABLES)


@lru_cache(maxsize=2)
def open_embedder(folder: Path) -> QueryEmbedder:
    """Returns what turns queries into vectors with the model in a folder: this process, or another with one thread.

    Each call with the same folder returns the same object. Raises TaskError if the model cannot be loaded.
    """
    if is_single_threaded():
        return OwnEmbedder(folder)
    process = EmbeddingProcess(folder)
    process.wait_until_ready()
    return process


def embed_passages(folder: Path, width: int, texts: Sequence[str]) -> Array:
    """Returns the vectors of passages, of shape [texts, width], in float32. Uses all cores, and tells how it gets on.

    Raises TaskError if the model cannot be loaded, or if a process ends.
    """
    vectors = np.empty((len(texts), width), np.float32)
    chunks = [range(start, min(start + CHUNK, len(texts))) for start in range(0, len(texts), CHUNK)]
    num_processes = max(1, min(MAX_PROCESSES, count_cores(), len(texts) // MIN_PASSAGES))
    progress = EmbeddingProgress(len(texts), num_processes)
    with ExitStack() as stack:
        free: list[EmbeddingProcess] = []
        for _ in range(num_processes):
            free.append(EmbeddingProcess(folder))
            stack.callback(free[-1].close)

        def embed_chunk(chunk: range) -> int:
            """Fills in the vectors of a chunk and returns their number."""
            # No more chunks are under way than there are processes.
            process = free.pop()
            try:
                vectors[chunk.start : chunk.stop] = process.embed([texts[n] for n in chunk], "passage")
            finally:
                free.append(process)
            return len(chunk)

        with ThreadPoolExecutor(num_processes) as pool:
            try:
                for count in pool.map(embed_chunk, chunks):
                    progress.add(count)
            except BaseException:
                # Otherwise the pool would first do all the rest.
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    progress.end()
    return vectors


class EmbeddingProgress:
    """Tells how many passages have a vector, now and then. Says nothing of what is done in a few seconds."""

    def __init__(self, total: int, num_processes: int) -> None:
        self.total = total
        self.num_processes = num_processes
        self._done = 0
        self._began = self._told = time.monotonic()
        self._was_told = False

    def add(self, count: int) -> None:
        """Counts passages, and tells how long the others will take, if it is time."""
        self._done += count
        now = time.monotonic()
        if now - self._told < NOTE_SECONDS or self._done == self.total:
            return
        self._told, self._was_told = now, True
        left = (now - self._began) * (self.total - self._done) / self._done
        log.info("vectors of passages: %s of %s; about %.0f s more", f"{self._done:,}", f"{self.total:,}", left)

    def end(self) -> None:
        """Tells how long it took, if anything was told before."""
        if self._was_told:
            seconds = time.monotonic() - self._began
            where = f"{self.num_processes} process{'es' if self.num_processes > 1 else ''}"
            log.info("the vectors of %s passages took %.0f s in %s", f"{self.total:,}", seconds, where)


def serve(folder: Path, requests: BinaryIO, replies: BinaryIO) -> None:
    """Loads a model, writes the width of its vectors, and answers requests until they end.

    What is wrong with the model is written in place of the width.
    """
    try:
        model = SentenceModel(folder)
    except CohortError as error:
        replies.write(json.dumps({"error": str(error)}).encode() + b"\n")
        replies.flush()
        return
    replies.write(json.dumps({"width": model.about.width}).encode() + b"\n")
    replies.flush()
    for line in requests:
        request = parse_json(line)
        for text in request["texts"]:
            replies.write(model.embed(text, request["kind"]).tobytes())
        replies.flush()


if __name__ == "__main__":
    # The process that reads may be gone.
    with suppress(BrokenPipeError):
        serve(Path(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
