"""What the stand-ins share: HTTP on a loopback port or a Unix socket, and requests that tests send to them only.

`POST /stand_in/fault` adds a fault (see `faults`), `DELETE /stand_in/fault` drops all. `GET /stand_in/seen` returns
[method, path, JSON body] of every other request, in order. No real server has such paths.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import socketserver
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import torch

from tests.helpers.engine_servers.faults import VARIABLE, Faults
from tests.helpers.engine_servers.sampler import Draft, Sampler

POLL_SECONDS = 0.02  # between two looks whether a client is still there
DTYPES = {
    **dict.fromkeys(("half", "float16"), torch.float16),
    **dict.fromkeys(("float", "float32"), torch.float32),
    "bfloat16": torch.bfloat16,
}


class Gone(Exception):
    """The server has died: the connection is closed without an answer."""


class Refusal(Exception):
    """Ends a request with a status and a JSON value."""

    def __init__(self, status: int, value: Any) -> None:
        super().__init__(f"{status} {value}")
        self.status, self.value = status, value


@dataclass(frozen=True, kw_only=True)
class Call:
    """One HTTP request."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # by lower-case name
    body: bytes
    is_open: Callable[[], bool]  # whether the client still waits

    def read_json(self) -> Any:
        """Returns the body. Raises ValueError if it is no JSON."""
        return json.loads(self.body)


Answer = Callable[[Call], Any]
"""Answers a request: with JSON, with text, or with None for an empty body. Raises Refusal for other statuses."""


class StandIn(ABC):
    """One server. A subclass has the routes of its kind."""

    generate_path: str

    def __init__(self) -> None:
        self.faults = Faults(self.generate_path)
        self.faults.add_from_variable(os.environ.get(VARIABLE, ""))
        self.seen: list[tuple[str, str, Any]] = []
        self.end: Callable[[int], None] = os._exit  # ends the process with a status
        self.sampler: Sampler

    @abstractmethod
    def answer(self, call: Call) -> Any:
        """Answers a request as the real server does. See `Answer`."""

    @abstractmethod
    def change(self, kind: str, value: Any) -> None:
        """Makes the answer to a generation have one token more (`extra_token`), or one score less."""

    def wait_for(self, draft: Draft, call: Call) -> None:
        """Submits a request and waits until it has ended. A client that goes away aborts it, as in the real servers."""
        self.sampler.submit(draft)
        while not draft.ended.wait(POLL_SECONDS):
            if not call.is_open():
                self.sampler.abort(lambda d: d is draft)

    def control(self, call: Call) -> Any:
        """Answers a request of a test."""
        if call.path == "/stand_in/seen":
            return self.seen
        if call.path != "/stand_in/fault":
            raise Refusal(404, f"{call.path} is unknown to the stand-in")
        if call.method == "DELETE":
            self.faults.clear()
        else:
            try:
                self.faults.add(call.read_json())
            except (ValueError, TypeError) as e:
                raise Refusal(400, str(e)) from e
        return {}


class Handler(BaseHTTPRequestHandler):
    """Handles one connection."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body leave together: Nagle's algorithm would delay a body of its own by 40 ms
    server: Server

    def answer(self) -> None:
        """Answers one request, whatever its method."""
        path, _, query = self.path.partition("?")
        call = Call(
            method=self.command,
            path=path,
            query={name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()},
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self.rfile.read(int(self.headers.get("Content-Length", "0"))),
            is_open=self.is_open,
        )
        stand_in = self.server.stand_in
        is_control = path.startswith("/stand_in/")
        fault = "" if is_control else stand_in.faults.use_reply_fault(path)
        status = 200
        try:
            if not is_control:
                stand_in.seen.append((self.command, self.path, self.read_for_list(call)))
            if fault == "hang":
                threading.Event().wait()
            if fault == "error_500":
                raise Refusal(500, {"error": {"message": "a fault", "type": "InternalServerError", "code": 500}})
            value = stand_in.control(call) if is_control else stand_in.answer(call)
            if fault in ("extra_token", "short_logprobs"):
                stand_in.change(fault, value)
        except Refusal as refusal:
            status, value = refusal.status, refusal.value
        except Gone:
            fault = "drop"
        if fault == "drop":
            self.close_connection = True
            return
        data = b"" if value is None else value.encode() if isinstance(value, str) else json.dumps(value).encode()
        if fault == "malformed":
            data = data[: len(data) // 2]
        self.send_response(status)
        if data:
            self.send_header("Content-Type", "text/plain" if isinstance(value, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def read_for_list(self, call: Call) -> Any:
        """Returns a request's body for the list of those that were seen."""
        try:
            return call.read_json()
        except ValueError:
            return call.body.decode(errors="replace")

    def is_open(self) -> bool:
        """Returns whether the client has not closed the connection."""
        ready = select.select([self.connection], [], [], 0)[0]
        return not ready or bool(self.connection.recv(1, socket.MSG_PEEK))

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Serves a stand-in at (host, port), or at the path of a Unix socket.

    A socket file that exists already is an error, and it stays when the server ends: so it is with vLLM.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int] | str, stand_in: StandIn) -> None:
        self.address_family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self.stand_in = stand_in
        super().__init__(address, Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        """Binds without the host name that HTTPServer looks up, which a Unix socket has not."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "stand-in", 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # that is a client that went away
            super().handle_error(request, client_address)

    @property
    def address(self) -> tuple[str, int] | str:
        """Where it listens."""
        found: tuple[str, int] | str = self.socket.getsockname()
        return found


def read_context(folder: Path, wanted: int | None, may_be_longer: bool = False) -> int:
    """Returns the most tokens of a sequence. Ends the process, as the real servers do, if the model has fewer."""
    if not (folder / "config.json").is_file():
        raise SystemExit(f"{folder} is no model folder, and the stand-in fetches nothing from a hub")
    limit = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    if wanted is not None and wanted > limit and not may_be_longer:
        raise SystemExit(f"a context of {wanted} tokens is longer than the model's: {limit}")
    return wanted or limit


def read_dtype(name: str, folder: Path) -> torch.dtype:
    """Returns the type that a flag names; "auto" = that of the model's files."""
    config = json.loads((folder / "config.json").read_text())
    return DTYPES[name if name != "auto" else config.get("dtype") or config.get("torch_dtype") or "float32"]


def serve_forever(stand_in: StandIn, address: tuple[str, int] | str) -> None:
    """Serves until the process is ended."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with Server(address, stand_in) as server:
        print("Application startup complete.", file=sys.stderr, flush=True)
        server.serve_forever(poll_interval=0.05)
