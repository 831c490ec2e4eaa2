"""The exchange with a running program: its input is written, its output read up to a limit, and its end awaited."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any

from cohort.system.json_text import parse_json

STOP_SECONDS = 20.0  # that a supervisor has to start a program, and to end one
_PIECE = 1 << 16


class ProgramClient:
    """The pipes of one program, and the socket to its supervisor."""

    def __init__(self, stdin: bytes, later: bytes, limit: int) -> None:
        """`later` is written to stdin after the first result came; `limit` is for the bytes of each output."""
        self.limit = limit
        self.is_late = False  # whether the program was not done in time
        self.is_over = False  # whether it wrote more than it may
        self._later = later
        self._waiting = bytearray(stdin)
        theirs_in, self._stdin = os.pipe()
        pairs = [os.pipe() for _ in range(3)]
        self.control, self._their_control = socket.socketpair()
        self._theirs = [theirs_in, *(pair[1] for pair in pairs)]
        self._outputs = {pair[0]: bytearray() for pair in pairs}  # stdout, stderr, results
        self._results = pairs[2][0]
        self._open = {self._stdin, *self._outputs}
        for fd in self._open:
            os.set_blocking(fd, False)

    def list_their_fds(self) -> list[int]:
        """Returns the ends that the supervisor gets: control, stdin, stdout, stderr and results."""
        return [self._their_control.fileno(), *self._theirs]

    def close_their_ends(self) -> None:
        """Closes the ends that the supervisor has got, so that its end is seen here."""
        self._their_control.close()
        while self._theirs:
            os.close(self._theirs.pop())

    def close(self) -> None:
        """Closes everything. The supervisor then ends the program, if it runs."""
        self.close_their_ends()
        self.control.close()
        for fd in self._open:
            os.close(fd)
        self._open.clear()

    @property
    def outputs(self) -> list[bytes]:
        """What the program wrote to stdout, stderr and results, each up to the limit."""
        return [bytes(data[: self.limit]) for data in self._outputs.values()]

    def wait(self, seconds: float) -> dict[str, Any]:
        """Exchanges data until the program has ended, and returns the supervisor's answer.

        `seconds` after it has started, and if it writes too much, the supervisor is told to end it. Raises OSError if
        the program does not start or the supervisor does not answer, ValueError if its answer is damaged.
        """
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        for fd in self._outputs:
            poll.register(fd, select.POLLIN)
        poll.register(self._stdin, select.POLLOUT)
        answer = b""
        is_stopped = False
        deadline = time.monotonic() + STOP_SECONDS
        while True:
            wait = deadline - time.monotonic()
            if wait <= 0 and not answer:
                raise OSError(f"it took longer than {STOP_SECONDS:g} s")
            if not is_stopped and (wait <= 0 or self.is_over):
                self.is_late = not self.is_over
                is_stopped = True
                self.control.shutdown(socket.SHUT_WR)
                deadline = time.monotonic() + STOP_SECONDS
                continue
            if wait <= 0:
                raise OSError("the program could not be ended")
            for fd, _ in poll.poll(wait * 1000 + 1):
                if fd == self.control.fileno():
                    data = self.control.recv(_PIECE)
                    # The first byte says that the program has started. Until then its time does not run.
                    if not answer and not is_stopped:
                        deadline = time.monotonic() + seconds
                    answer += data
                    if not data:
                        return self._finish(answer)
                elif fd == self._stdin:
                    self._write(poll)
                else:
                    self._read(poll, fd)

    def _finish(self, answer: bytes) -> dict[str, Any]:
        """Reads what is left in the pipes after the end of the program, and returns the answer as a dict."""
        for fd in self._outputs:
            while fd in self._open and self._read(None, fd):
                pass
        if not answer:
            raise OSError("the spawner of programs is gone")
        value = parse_json(answer)
        if not isinstance(value, dict):
            raise ValueError("the answer of the supervisor is damaged")
        return value

    def _read(self, poll: select.poll | None, fd: int) -> bool:
        """Reads a piece of an output. Returns whether there may be more. Its end is closed."""
        kept = self._outputs[fd]
        try:
            data = os.read(fd, _PIECE)
        except BlockingIOError:
            return False
        if not data:
            self._close_one(poll, fd)
            return False
        if len(kept) <= self.limit:
            kept += data
        self.is_over = self.is_over or len(kept) > self.limit
        if fd == self._results and self._later and poll is not None:
            self._waiting += self._later
            self._later = b""
            poll.register(self._stdin, select.POLLOUT)
        return not self.is_over

    def _write(self, poll: select.poll) -> None:
        """Writes as much of the input as the program takes now. After the last of it, stdin is closed."""
        try:
            if self._waiting:
                del self._waiting[: os.write(self._stdin, self._waiting)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # The program has closed its input.
            self._waiting.clear()
            self._later = b""
        if self._waiting:
            return
        if self._later:
            poll.unregister(self._stdin)
        else:
            self._close_one(poll, self._stdin)

    def _close_one(self, poll: select.poll | None, fd: int) -> None:
        """Closes one of the pipes."""
        if poll is not None:
            poll.unregister(fd)
        os.close(fd)
        self._open.discard(fd)
