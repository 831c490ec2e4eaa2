"""Runs commands in forked children of a process that has imported torch, which saves two seconds per command.

`python -m tests.helpers.fork_server` reads one request per line, and answers each with a line when its child has ended.
A child does what `python -m tests.helpers.struck_command` does after its imports.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.helpers import struck_command as strike
from tests.helpers.command_line import ENV, ROOT

PATIENCE = 600.0  # seconds a command may take
# Modules that commands import, some of them only at first use, such as the rest of torch at the first update.
IMPORTS = (
    "cohort.jobs.build",
    "cohort.cli.main",
    "torch.fx.experimental.symbolic_shapes",
    "tyro._backends._tyro_backend",
    "typeguard",
)


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
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            words = [*map(str, orders), "--", *map(str, args)]
            request = {"at": str(at), "out": str(out), "err": str(err), "words": words}
            answer = self._ask(request, f"cohort {shlex.join(map(str, args))}")
            return Ended(**answer, stdout=out.read_text(), stderr=err.read_text())

    def prepare(self, *modules: str) -> None:
        """Imports modules in the server, for commands that would each import them."""
        self._ask({"import": modules}, f"import {modules}")

    def _ask(self, request: Mapping[str, object], what: str) -> dict[str, Any]:
        """Sends a request to the server and returns its answer. `what` names the request in an error."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        assert ready, f"{what} has not ended within {PATIENCE} s"
        return json.loads(self._process.stdout.readline())


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


def import_modules(modules: Sequence[str]) -> None:
    """Imports modules, and keeps all objects out of the children's garbage collections.

    A child's last collection would visit every object and so copy its memory page, which takes half a second.
    """
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def serve() -> None:
    """Forks a child per request on stdin, and prints its process id and exit code."""
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as in `tests.helpers.struck_command`
    import_modules(IMPORTS)
    for line in sys.stdin:
        request = json.loads(line)
        if "import" in request:
            import_modules(request["import"])
            print("{}", flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            sys.exit(run_request(request))
        status = os.waitpid(pid, 0)[1]
        print(json.dumps({"pid": pid, "returncode": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve()
