"""One worker process, seen from the pool: start it, write to it, read from it, end it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cohort.scoring.wire import MAX_LINE, Hello, Item, Ready, Reply

# What a worker may know of its surroundings: an allow-list, since keys go by too many names to be denied.
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def worker_environment() -> dict[str, str]:
    """The allowed variables, and what makes graders repeatable: one thread, a fixed hash seed."""
    kept = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    home = str(Path(__file__).resolve().parents[2])
    fixed = {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "PYTHONPATH": home}
    return kept | fixed | dict.fromkeys(ONE_THREAD, "1")


# What ends a process that works too much: its CPU limits, a stack or a heap that is used up. Not SIGKILL, which others
# send: the kernel when the machine runs out of memory, and people.
EXHAUSTED = (signal.SIGPROF, signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


@dataclass(frozen=True, slots=True)
class End:
    """How a worker had ended before it was killed."""

    how: str
    exhausted: bool = False  # by too much work of its own
    over_limit: bool = False  # of CPU time


class Worker:
    """A process in a session of its own, with a pipe each way that never blocks the pool.

    The kernel kills a worker when the thread that made it ends: make pools in a thread that outlives them.
    """

    def __init__(self, hello: Hello, serial: int) -> None:
        self.serial = serial  # a later worker has a higher one
        self.ready: Ready | None = None
        self.items: deque[Item] = deque()  # sent or about to be, in order; the first is being scored
        self.since = time.monotonic()  # of the last thing it did
        self.wasted_since: float | None = None  # when it was first seen at work that nobody wants any more
        self.garbled = ""
        self._incoming = bytearray()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the worker)
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        arguments = map(str, (requests, replies, os.getpid()))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cohort.scoring.worker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(requests, replies),
            env=worker_environment(),
            start_new_session=True,
        )
        os.close(requests)
        os.close(replies)
        for fd in (self._requests, self._replies):
            os.set_blocking(fd, False)
        self._outgoing = bytearray(hello.encode())
        self._held_up = False  # the pipe was full at the last write
        self.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, poll: select.poll) -> None:
        """Wake the poll when this worker has said something, or can be told more."""
        poll.register(self._replies, select.POLLIN)
        if self._outgoing:
            poll.register(self._requests, select.POLLOUT)

    def send(self, item: Item) -> None:
        if not self.items:
            self.since = time.monotonic()
        self.items.append(item)
        self._outgoing += item.encode()

    def flush(self) -> None:
        """Write what the pipe takes. A dead reader is noticed by `died`, not here."""
        with suppress(BlockingIOError, BrokenPipeError):
            while self._outgoing:
                written = os.write(self._requests, self._outgoing)
                del self._outgoing[:written]
                if self._held_up:  # it may have been waiting for this, so its time starts now
                    self.since = time.monotonic()
        self._held_up = bool(self._outgoing)

    def read(self) -> list[Reply]:
        """The replies that have arrived. After something that is not one, `garbled` is set."""
        with suppress(BlockingIOError):
            while len(self._incoming) <= MAX_LINE and (data := os.read(self._replies, 1 << 16)):
                self._incoming += data
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming = bytearray(rest)
        replies: list[Reply] = []
        try:
            replies += map(Reply.decode, lines)
        except (ValueError, TypeError, RecursionError):
            self.garbled = "it wrote into the scoring protocol"
        if len(rest) > MAX_LINE:
            self.garbled = "its reply has no end"
        if replies:
            self.since = time.monotonic()
        return replies

    def died(self) -> bool:
        """Whether the process has ended. It is reaped by `kill`: until then its id and group stay its own."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:  # somebody in this process waits for any child
            return True

    def kill(self) -> End:
        """End it and everything in its group; say how it had ended if it was dead already."""
        already = self.died()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._log.seek(0)
        said = self._log.read(2000).decode(errors="replace").strip()
        self._log.close()
        os.close(self._requests)
        os.close(self._replies)
        if not already:
            return End("was killed")
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        text = how + (f"; it said {said[-300:]!r}" if said else "")
        return End(text, -code in EXHAUSTED, -code in (signal.SIGPROF, signal.SIGXCPU))
