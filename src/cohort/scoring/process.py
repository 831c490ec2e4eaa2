"""One scoring worker as the pool sees it: starting the process, writing to it, reading from it, ending it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cohort.scoring.wire import MAX_LINE, Hello, Item, Ready, Reply
from cohort.system.guard import END_SECONDS
from cohort.system.json_text import parse_json
from cohort.system.process import THREAD_VARIABLES, describe_exit
from cohort.system.secrets import Secrets

# Environment variables that a worker gets. This is a list of what is allowed, because keys and other secrets have too
# many names to be listed.
ALLOWED_VARIABLES = (
    *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    # Folders: a task may read data there, such as the passages of a search and their index.
    *("COHORT_DATA", "COHORT_CACHE"),
)


def make_worker_environment(names: Iterable[str] = ()) -> dict[str, str]:
    """Returns the environment variables of a worker: those of this process that are allowed, and fixed ones.

    `names` are further ones that the user allows. The fixed ones are one thread and a fixed hash seed, which make
    graders repeatable, and a PYTHONPATH that has only the folder of this package.
    """
    kept = {name: os.environ[name] for name in (*ALLOWED_VARIABLES, *names) if name in os.environ}
    source_folder = str(Path(__file__).resolve().parents[2])
    fixed = {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "PYTHONPATH": source_folder}
    return kept | fixed | dict.fromkeys(THREAD_VARIABLES, "1")


def is_reserved(name: str) -> bool:
    """Returns whether workers have an environment variable in any case, or must not have the user's own value of it."""
    return name.startswith("PYTHON") or name in (*ALLOWED_VARIABLES, *THREAD_VARIABLES)


# Signals that end a process because of its own work: its CPU limits, or a stack or heap that is used up. SIGKILL is not
# among them, because it comes from outside: from the kernel when the whole machine runs out of memory, or from a user.
EXHAUSTION_SIGNALS = (signal.SIGPROF, signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


# Seconds that a guard has to end its worker; it needs thousandths. A guard may be stopped by foreign code.
GUARD_SECONDS = 2 * END_SECONDS


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a worker ended, as `Worker.kill` found it."""

    how: str  # a verb phrase for messages, as in "exited with 1"
    exhausted: bool = False  # whether its own work ended it: too much time or memory
    over_limit: bool = False  # whether it used up its CPU time


class Worker:
    """A scoring worker and its guard: two processes, and a pipe in each direction that never blocks the pool.

    The guard is this process's child, and the worker the guard's. When this process ends for any reason, the guard ends
    the worker and what that has started.
    """

    def __init__(self, hello: Hello, serial: int) -> None:
        self.serial = serial  # a worker that is started later has a higher one
        self.ready: Ready | None = None  # what the worker said of its task; None until it has loaded it
        self.items: deque[Item] = deque()  # sent or about to be sent, in order; the first is being scored
        self.last_active = time.monotonic()  # when it last replied, or got work after it had none
        self.wasted_since: float | None = None  # since when it has been scoring an item that was dropped
        self.garbled = ""  # what is wrong with its replies; "" = nothing
        self.secrets = Secrets(hello.env)
        self._incoming = bytearray()
        # What the process itself prints, for the message about its death. The worker captures what the grader prints.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the worker)
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        # Nothing is sent through it until the worker is to end. The end of this process closes it.
        lifeline, self._lifeline = os.pipe()
        arguments = map(str, (requests, replies, lifeline, os.getpid()))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cohort.scoring.worker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(requests, replies, lifeline),
            env=make_worker_environment(hello.env),
            start_new_session=True,
        )
        for fd in (requests, replies, lifeline):
            os.close(fd)
        for fd in (self._requests, self._replies):
            os.set_blocking(fd, False)
        self._outgoing = bytearray(hello.encode())
        self._pipe_was_full = False  # at the last write
        self.flush()

    @property
    def guard_pid(self) -> int:
        """The process id of the worker's guard."""
        return self._process.pid

    def register_with(self, poll: select.poll) -> None:
        """Adds the worker's pipes to `poll`, which then wakes when the worker has written.

        If requests wait to be sent, `poll` also wakes when the pipe has room for them.
        """
        poll.register(self._replies, select.POLLIN)
        if self._outgoing:
            poll.register(self._requests, select.POLLOUT)

    def send(self, item: Item) -> None:
        """Queues an item for this worker and adds it to `items`; `flush` writes it to the pipe.

        Restarts the worker's clock (`last_active`) if it had no items.
        """
        if not self.items:
            self.last_active = time.monotonic()
        self.items.append(item)
        self._outgoing += item.encode()

    def flush(self) -> None:
        """Writes as much of the hello and the queued items as the pipe takes now, without waiting.

        Raises nothing if the worker is dead. Restarts the worker's clock (`last_active`) if the pipe was full before
        and takes more now.
        """
        with suppress(BlockingIOError, BrokenPipeError):
            while self._outgoing:
                written = os.write(self._requests, self._outgoing)
                del self._outgoing[:written]
                # The worker may have been waiting for the rest of an item, so its time starts now.
                if self._pipe_was_full:
                    self.last_active = time.monotonic()
        self._pipe_was_full = bool(self._outgoing)

    def read_replies(self) -> list[Reply]:
        """Returns the replies that have arrived, in order, without waiting. What exceeds 1 MiB waits for the next call.

        Sets `garbled` to an explanation if a line is no reply or is too long; later lines are then lost. Restarts the
        worker's clock (`last_active`) if there are replies.
        """
        # At most one over-long line is read: a grader that writes without end must not fill the pool's memory.
        with suppress(BlockingIOError):
            while len(self._incoming) <= MAX_LINE and (data := os.read(self._replies, 1 << 16)):
                self._incoming += data
        *lines, rest = bytes(self._incoming).split(b"\n")
        self._incoming = bytearray(rest)
        replies: list[Reply] = []
        try:
            # One by one: replies before a line that is none are good, the worker's first among them.
            for line in lines:
                replies.append(self._decode(line))
        except ValueError:
            self.garbled = "the grader wrote into the pipe of the scoring protocol"
        if len(rest) > MAX_LINE:
            self.garbled = f"the reply of the grader's process is longer than {MAX_LINE} bytes"
        if replies:
            self.last_active = time.monotonic()
        return replies

    def _decode(self, line: bytes) -> Reply:
        """Returns the reply in a line. The worker has removed secrets already, but foreign code may write lines too."""
        if not self.secrets.names:
            return Reply.decode(line)
        return Reply.decode(json.dumps(self.secrets.remove_from_value(parse_json(line))).encode())

    def has_died(self) -> bool:
        """Returns whether worker and guard have ended, without waiting. `kill` can still tell how."""
        return self._process.poll() is not None

    def kill(self) -> ProcessEnd:
        """Ends the worker and all processes that it started, waits for that, and closes the pipes. To be called once.

        Returns how the worker ended: "was killed", or what had ended it before this call and what it had printed.
        """
        was_dead = self.has_died()
        # Told by a byte, because forks of this process may hold the pipe open. A guard that is dead does not read it.
        with suppress(BrokenPipeError):
            os.write(self._lifeline, b"!")
        try:
            code = self._process.wait(GUARD_SECONDS)
        except subprocess.TimeoutExpired:
            # Foreign code has stopped the guard.
            self._process.kill()
            code = self._process.wait()
        self._log.seek(0)
        # More is read than is shown, so that no secret is cut in two before it is removed.
        printed = self.secrets.remove_from(self._log.read(10_000).decode(errors="replace"))[:2000].strip()
        self._log.close()
        for fd in (self._requests, self._replies, self._lifeline):
            os.close(fd)
        if not was_dead:
            return ProcessEnd("was killed")
        how = describe_exit(code)
        text = how + (f"; it had printed {printed[-300:]!r}" if printed else "")
        return ProcessEnd(text, -code in EXHAUSTION_SIGNALS, -code in (signal.SIGPROF, signal.SIGXCPU))
