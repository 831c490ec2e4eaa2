"""Starts stand-ins for tests: in this process, or in one of their own that can be killed and stopped."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.engine_servers import sglang, vllm
from tests.helpers.engine_servers.base import Server, StandIn

ROOT = Path(__file__).parents[3]
PATIENCE = 60.0
MODULES = {"vllm": "tests.helpers.engine_servers.vllm", "sglang": "tests.helpers.engine_servers.sglang"}


class UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


@dataclass(frozen=True)
class Address:
    """Where a server listens, to ask it: (host, port), or the path of a Unix socket."""

    place: tuple[str, int] | str

    def connect(self, timeout: float = PATIENCE) -> http.client.HTTPConnection:
        """Returns a new connection."""
        if isinstance(self.place, str):
            return UnixConnection(self.place, timeout)
        return http.client.HTTPConnection(*self.place, timeout=timeout)

    def ask(
        self, method: str, path: str, body: Any = None, timeout: float = PATIENCE, **headers: str
    ) -> tuple[int, Any]:
        """Sends one request and returns status and JSON, or text that is none. `body` is bytes, or sent as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {name.replace("_", "-"): text for name, text in headers.items()}
        connection = self.connect(timeout)
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", **given})
            reply = connection.getresponse()
            text = reply.read().decode()
        finally:
            connection.close()
        try:
            return reply.status, json.loads(text)
        except ValueError:
            return reply.status, text

    def add_fault(self, kind: str, **fields: Any) -> None:
        """Makes a stand-in misbehave."""
        status, value = self.ask("POST", "/stand_in/fault", {"kind": kind, **fields})
        assert status == 200, value


@contextmanager
def serve_here(kind: str, folder: Path, *flags: str, place: str | None = None) -> Iterator[tuple[Address, StandIn]]:
    """Runs a stand-in in a thread, on a free port or a Unix socket.

    Where it would end the process, it refuses connections. The environment's variables count as they are now.
    """
    made: StandIn
    if kind == "vllm":
        made = vllm.VllmServer(vllm.make_parser().parse_args(["--model", str(folder), *flags]))
    else:
        made = sglang.SglangServer(sglang.make_parser().parse_args(["--model-path", str(folder), *flags]))
    with Server(place or ("127.0.0.1", 0), made) as server:

        def stop() -> None:
            server.shutdown()
            server.server_close()

        made.end = lambda _: threading.Thread(target=stop).start()
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield Address(server.address), made
        server.shutdown()


def make_command(kind: str, python: str = sys.executable) -> list[str]:
    """Returns the first words of the command that starts a stand-in in the folder of the repository."""
    return [python, "-m", MODULES[kind]]


def write_python(path: Path, kind: str) -> Path:
    """Writes a program that takes the words of a Python with a server installed, and starts a stand-in of the kind.

    `PROGRAM -m any.module --flag ...` runs the stand-in with the flags.
    """
    command = shlex.join(make_command(kind))
    path.write_text(
        f'#!/bin/sh\nshift 2\nexport PYTHONPATH={shlex.quote(str(ROOT))}:$PYTHONPATH\nexec {command} "$@"\n'
    )
    path.chmod(0o755)
    return path


def find_free_port() -> int:
    """Returns a port that nothing listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def start(
    kind: str, folder: Path, *flags: str, place: str | None = None, **variables: str
) -> Iterator[tuple[Address, subprocess.Popen[bytes]]]:
    """Starts a stand-in in a process of its own, and kills it in the end. `place` is a Unix socket, for vLLM only.

    `variables` are set in its environment.
    """
    address = Address(place or ("127.0.0.1", find_free_port()))
    if isinstance(address.place, str):
        where = ["--uds", address.place]
    else:
        where = ["--host", "127.0.0.1", "--port", str(address.place[1])]
    words = ["--model" if kind == "vllm" else "--model-path", str(folder), *where, *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with subprocess.Popen([*make_command(kind), *words], cwd=ROOT, env=env) as process:
        try:
            wait_until_ready(address, process)
            yield address, process
        finally:
            process.kill()


def wait_until_ready(address: Address, process: subprocess.Popen[bytes]) -> None:
    """Waits until a server answers. Fails if its process ends, or if it takes too long."""
    end = time.monotonic() + PATIENCE
    while True:
        assert process.poll() is None, f"the server ended with status {process.returncode}"
        assert time.monotonic() < end, "the server does not start"
        try:
            address.ask("GET", "/stand_in/seen", timeout=1)
        except OSError:
            time.sleep(0.05)
        else:
            return
