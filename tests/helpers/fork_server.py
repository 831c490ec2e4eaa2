"""Command lines without the two seconds in which torch is imported: children of one process that has done so.

`python -m tests.helpers.fork_server` reads a request per line and answers each with a line when its child has ended.
A child is what `python -m tests.helpers.struck_command` is after its imports.
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
    """A command line that has ended, as `subprocess.CompletedProcess` tells it, and its process id."""

    pid: int
    returncode: int
    stdout: str
    stderr: str


class StrikeServer:
    """Starts the server; `run` is one command line to its end."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.helpers.fork_server"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> StrikeServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()

    def run(self, *args: object, at: Path, orders: Sequence[object] = ()) -> Ended:
        """`cohort ARGS` in the folder `at`, with `orders` as in `tests.helpers.struck_command`."""
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
def shared_server() -> StrikeServer:
    """One server for all tests of this process."""
    server = StrikeServer()
    atexit.register(server.__exit__, None, None, None)
    return server


def become(request: dict[str, object]) -> int:
    """In the child: the folder and the output of the request, then its command line."""
    os.chdir(str(request["at"]))
    for number, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        os.dup2(os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    return strike.main(list(request["words"]))  # type: ignore[call-overload]


def serve() -> None:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as in `tests.helpers.struck_command`

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            sys.exit(become(json.loads(line)))
        status = os.waitpid(pid, 0)[1]
        print(json.dumps({"pid": pid, "returncode": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve()
