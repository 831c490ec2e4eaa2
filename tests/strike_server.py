"""Command lines without the two seconds in which torch is imported: children of one process that has done so.

`python -m tests.strike_server` reads a request per line and answers each with a line when its child has ended.
A child is what `python -m tests.strike` is after its imports.
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

from tests import strike
from tests.real_run import ENV, ROOT

PATIENCE = 300.0  # seconds a command may take
# What the commands import and, after these, at the first use of it: the rest of torch at the first update, and so on.
IMPORTS = (
    "cohort.build",
    "cohort.cli.main",
    "torch.fx.experimental.symbolic_shapes",
    "tyro._backends._tyro_backend",
    "typeguard",
)


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
        command = [sys.executable, "-m", "tests.strike_server"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> StrikeServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()

    def run(self, *args: object, at: Path, orders: Sequence[object] = ()) -> Ended:
        """`cohort ARGS` in the folder `at`, with `orders` as in `tests.strike`."""
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            words = [*map(str, orders), "--", *map(str, args)]
            request = {"at": str(at), "out": str(out), "err": str(err), "words": words}
            answer = self._ask(request, f"cohort {shlex.join(map(str, args))}")
            return Ended(**answer, stdout=out.read_text(), stderr=err.read_text())

    def prepare(self, *modules: str) -> None:
        """Import more, for commands that would each do so."""
        self._ask({"import": modules}, f"import {modules}")

    def _ask(self, request: Mapping[str, object], what: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        assert ready, f"{what} has not ended within {PATIENCE} s"
        return json.loads(self._process.stdout.readline())


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


def load(modules: Sequence[str]) -> None:
    """Import, and keep what is there out of the children's garbage collections.

    At the end of a child they would look at all of it, and copy each page they look at: half a second.
    """
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def serve() -> None:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as in `tests.strike`
    load(IMPORTS)
    for line in sys.stdin:
        request = json.loads(line)
        if "import" in request:
            load(request["import"])
            print("{}", flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            sys.exit(become(request))
        status = os.waitpid(pid, 0)[1]
        print(json.dumps({"pid": pid, "returncode": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve()
