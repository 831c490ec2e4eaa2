"""A native engine in a process of its own, as the fleet that uses it sees it."""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from cohort import errors
from cohort.engines.base import WorkCounters
from cohort.engines.fleet.base import LoadedWeights, News, NewsQueue, OfferedWeights, Order, ReplicaLost
from cohort.engines.fleet.wire import (
    EngineCall,
    EngineHello,
    EngineNews,
    EngineReply,
    EngineWork,
    limit_sending,
    receive_message,
    send_message,
)
from cohort.errors import CohortError
from cohort.system.guard import END_SECONDS
from cohort.system.process import describe_exit
from cohort.types import Sample

log = logging.getLogger(__name__)

PROGRAM = "cohort.engines.fleet.worker"  # what an engine process runs


@dataclass(kw_only=True, slots=True)
class _Connection:
    """One start of an engine process: its guard, the pipes, and what it has said."""

    guard: subprocess.Popen[bytes]
    socket: socket.socket
    lifeline: int  # file descriptor: the guard ends the process when something comes through it
    printed: IO[bytes]  # what the process prints, for the message about its death
    replies: queue.SimpleQueue[EngineReply | None] = field(default_factory=queue.SimpleQueue)  # None = it is gone
    last_heard: float = field(default_factory=time.monotonic)
    is_gone: bool = False


class ProcessReplica:
    """An engine process, number `number` of its fleet. `patience` is the time limit in seconds of everything it does.

    `where` says for messages which one it is. `environment` has variables that it gets besides those of this process.
    """

    def __init__(
        self,
        number: int,
        where: str,
        hello: EngineHello,
        news: NewsQueue,
        patience: float,
        environment: Mapping[str, str],
    ) -> None:
        self.number = number
        self.where = where
        self.is_ours = True
        self.hello = hello
        self.patience = patience
        self.environment = environment
        self.serial = 0
        self.work = WorkCounters()
        self._news = news
        self._connection: _Connection | None = None
        self._num_calls = 0

    def start(self) -> None:
        """Starts the process and waits until it has loaded the model. Raises ReplicaLost, or an error of the model."""
        self.serial += 1
        ours, theirs = socket.socketpair()
        lifeline, own_lifeline = os.pipe()
        printed = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        guard = subprocess.Popen(
            [
                # -P: no file of the working directory takes the place of a module.
                *(sys.executable, "-P", "-m", PROGRAM),
                *map(str, (theirs.fileno(), lifeline, os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=(theirs.fileno(), lifeline),
            # Ctrl-C on a terminal reaches all processes of the session: this program decides what ends.
            start_new_session=True,
            env={**os.environ, **self.environment, "PYTHONPATH": _make_import_path()},
        )
        theirs.close()
        os.close(lifeline)
        limit_sending(ours, self.patience)
        made = self._connection = _Connection(guard=guard, socket=ours, lifeline=own_lifeline, printed=printed)
        self._send(self.hello)
        threading.Thread(target=self._read_messages, args=(made, self.serial), daemon=True).start()
        self._wait_for_reply(0, "to load the model")

    def send(self, orders: Sequence[Order]) -> None:
        """Hands over requests and what to forget, in this order."""
        assert self._connection is not None
        # Its time to answer begins now, if it had nothing to do.
        self._connection.last_heard = time.monotonic()
        self._send(EngineWork(orders=list(orders)))

    def abort(self, id: str) -> Sample | None:
        """Stops a request and returns its partial sample. None = it has ended, and its news are in the queue."""
        found: Sample | None = self._call("to stop a request", what="abort", id=id)
        return found

    def load(self, folder: Path, version: int) -> LoadedWeights:
        """Loads the weights in a folder, and returns the checksums of what the process has then."""
        found: LoadedWeights = self._call("to load weights", what="load", folder=str(folder), version=version)
        return found

    def load_offered(self, offered: OfferedWeights, version: int) -> LoadedWeights:
        """Loads weights from memory of the GPU, and returns the checksums of what the process has then."""
        self._call("to open the memory with new weights", what="open", memory=offered.handle, tensors=offered.tensors)
        for portion in offered.portions:
            # The reply says that it has copied them: the next portion takes their place.
            self._call("to copy new weights", what="copy", tensors=portion)
        found: LoadedWeights = self._call("to load weights", what="finish", version=version)
        return found

    def compute_logprobs(self, tokens: list[int]) -> list[float]:
        """Returns the log-probability of every token after the first, at temperature 1, with the current weights."""
        found: list[float] = self._call("to compute log-probabilities", what="logprobs", tokens=tokens)
        return found

    def find_fault(self, is_busy: bool) -> str:
        """Returns why the process counts as lost: it has ended, or is silent although it has work; "" = it is well."""
        made = self._connection
        if made is None or made.is_gone or made.guard.poll() is not None:
            return self._describe_end()
        silence = time.monotonic() - made.last_heard
        return f"has said nothing for {silence:.0f} s" if is_busy and silence > self.patience else ""

    def end(self) -> None:
        """Ends the process, however it is, and waits for that. A second call does nothing."""
        made, self._connection = self._connection, None
        if made is None:
            return
        # Out of date from now on.
        self.serial += 1
        _end_guard(made)
        with suppress(OSError):
            made.socket.shutdown(socket.SHUT_RDWR)
        made.socket.close()
        os.close(made.lifeline)
        made.printed.close()

    def _describe_end(self) -> str:
        """Returns how the process ended, with the last of what it printed."""
        made = self._connection
        if made is None:
            return "was ended"
        with suppress(subprocess.TimeoutExpired):
            # The connection ends a moment before the process does.
            made.guard.wait(END_SECONDS)
        code = made.guard.poll()
        how = "closed its connection" if code is None else describe_exit(code)
        made.printed.seek(0)
        lines = made.printed.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}; it had printed {last[-300:]!r}" if last else how

    def _call(self, purpose: str, **arguments: Any) -> Any:
        """Sends a call and returns what it gives. Raises ReplicaLost, or the error of Cohort that it raised there."""
        self._num_calls += 1
        self._send(EngineCall(number=self._num_calls, **arguments))
        return self._wait_for_reply(self._num_calls, purpose)

    def _send(self, message: Any) -> None:
        """Sends a message. Raises ReplicaLost if the process is gone, or takes nothing for `patience` seconds."""
        made = self._connection
        if made is None:
            raise ReplicaLost("was ended")
        try:
            send_message(made.socket, message)
        except BlockingIOError:
            raise ReplicaLost(f"has read nothing for {self.patience:.0f} s") from None
        except OSError:
            raise ReplicaLost(self._describe_end()) from None

    def _wait_for_reply(self, number: int, purpose: str) -> Any:
        """Waits for the reply to a call and returns its value. Raises ReplicaLost after `patience` seconds."""
        made = self._connection
        if made is None:
            raise ReplicaLost("was ended")
        deadline = time.monotonic() + self.patience
        reply: EngineReply | None = None
        while reply is None or reply.number < number:
            try:
                reply = made.replies.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ReplicaLost(f"needed more than {self.patience:.0f} s {purpose}") from None
            if reply is None:
                raise ReplicaLost(self._describe_end())
        if reply.error:
            raise self._make_error(reply)
        return reply.value

    def _make_error(self, reply: EngineReply) -> CohortError:
        """Returns the error that a reply reports, of its own class. A bug there is a loss here."""
        cls = getattr(errors, reply.error, None)
        if isinstance(cls, type) and issubclass(cls, CohortError):
            return cls(reply.text)
        return ReplicaLost(f"failed with {reply.text}")

    def _read_messages(self, made: _Connection, serial: int) -> None:
        """Passes on what the process says until it is gone. Runs in a thread of its own."""
        while True:
            try:
                message = receive_message(made.socket)
            except ValueError as error:
                log.warning("%s sent something that is no message: %s", self.where, error)
                message = None
            made.last_heard = time.monotonic()
            if isinstance(message, EngineNews):
                self.work = message.work
                for line in message.warnings:
                    log.warning("%s: %s", self.where, line)
                for id, sample in zip(message.ids, message.samples, strict=True):
                    self._news.put(News(replica=self.number, serial=serial, id=id, sample=sample))
            elif isinstance(message, EngineReply) and message.number < 0:
                self._news.put(News(replica=self.number, serial=serial, error=self._make_error(message)))
            elif isinstance(message, EngineReply):
                made.replies.put(message)
            else:
                made.is_gone = True
                made.replies.put(None)
                # Ends the wait for news.
                self._news.put(News(replica=self.number, serial=serial))
                return


def _make_import_path() -> str:
    """Returns the PYTHONPATH of an engine process: it imports this very package."""
    own = str(Path(__file__).resolve().parents[3])
    before = os.environ.get("PYTHONPATH")
    return f"{own}{os.pathsep}{before}" if before else own


def _end_guard(made: _Connection) -> None:
    """Ends the guard of an engine process, and with it the process."""
    # Told by a byte, because forks of this process may hold the pipe open. A guard that is dead does not read it.
    with suppress(BrokenPipeError):
        os.write(made.lifeline, b"!")
    try:
        made.guard.wait(2 * END_SECONDS)
    except subprocess.TimeoutExpired:
        # It was stopped by a signal. The engine process ends when its guard does.
        made.guard.kill()
        made.guard.wait()
