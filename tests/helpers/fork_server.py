"""Runs commands in forked children of a process that has imported torch, which saves two seconds per command.

`python -m tests.helpers.fork_server` reads one request per line, and answers each with a line when its child has ended.
A child does what `python -m tests.helpers.struck_command` does after its imports.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType

from tests.helpers import struck_command as strike
from tests.helpers.command_line import ENV, ROOT

PATIENCE = 300.0  # seconds a command may take


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended: the fields of `subprocess.CompletedProcess`, and its process id."""

    pid: int
    returncode: int
    stdout: str
    stderr: str


class ForkServer:
    """A server process. `run` runs one command in a child of it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.helpers.fork_server"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()

    def run(self, *args: object, at: Path, orders: Sequence[object] = ()) -> Ended:
        """Runs `cohort ARGS` in the folder `at` to its end. `orders` are those of `tests.helpers.struck_command`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            words = [*map(str, orders), "--", *map(str, args)]
            request = {"at": str(at), "out": str(out), "err": str(err), "words": words}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
            assert ready, f"cohort {shlex.join(map(str, args))} has not ended within {PATIENCE} s"
            answer = json.loads(self._process.stdout.readline())
            return Ended(**answer, stdout=out.read_text(), stderr=err.read_text())


@cache
def shared_server() -> ForkServer:
    """Returns the one server for all tests of this process."""
    server = ForkServer()
    atexit.register(server.__exit__, None, None, None)
    return server


def run_request(request: dict[str, object]) -> int:
    """Runs the command of a request in the child, in its folder and with its output files. Returns the exit code."""
    os.chdir(str(request["at"]))
    for number, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        os.dup2(os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    return strike.main(list(request["words"]))  # type: ignore[call-overload]


def serve() -> None:
    """Forks a child per request on stdin, and prints its process id and exit code."""
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as in `tests.helpers.struck_command`

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            sys.exit(run_request(json.loads(line)))
        status = os.waitpid(pid, 0)[1]
        print(json.dumps({"pid": pid, "returncode": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve()
