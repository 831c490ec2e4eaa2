"""A real HTTP server that stands in for an OpenAI-compatible one and can be told to misbehave."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helpers.engine_conformance import spell

Behaviour = Callable[["Handler", dict[str, Any]], None]
"""Answers one request: behaviour(handler, JSON body)."""


class Handler(BaseHTTPRequestHandler):
    """Handles one connection. Each POST uses up the first of the server's `behaviours`; the last one stays."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FakeServer

    def setup(self) -> None:
        super().setup()
        self.server.num_connections += 1

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers), {}))
        self.server.listing(self, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append((self.path, dict(self.headers), body))
            behave = self.server.behaviours[0]
            if len(self.server.behaviours) > 1:
                self.server.behaviours.pop(0)
        behave(self, body)

    def reply(self, value: Any, status: int = 200, **headers: str) -> None:
        """Sends bytes, or a value as JSON. Underscores in names of headers stand for hyphens."""
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content_Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class FakeServer(ThreadingHTTPServer):
    """The server. `seen` has (path, headers, JSON body) of every request."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.behaviours: list[Behaviour] = [babble]
        self.listing: Behaviour = models("small")
        self.num_connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def asked(self) -> list[dict[str, Any]]:
        """JSON bodies of all requests except those for the list of models."""
        return [body for path, _, body in self.seen if path != "/v1/models"]

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client has closed the connection


def models(*names: str, owner: str = "somebody") -> Behaviour:
    """Replies with a list of models with these names."""
    return lambda h, _: h.reply({"object": "list", "data": [{"id": n, "owned_by": owner} for n in names]})


def chat(content: Any = "4", reason: Any = "stop", num: int = 2, **message: Any) -> dict[str, Any]:
    """Returns the reply to a chat request: content, finish reason and number of tokens, with more message fields."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": reason}
    return {"choices": [choice], "usage": {"completion_tokens": num}}


def answers(content: Any = "4", reason: Any = "stop", num: int = 2, **message: Any) -> Behaviour:
    """Replies with `chat` of these values."""
    return lambda h, _: h.reply(chat(content, reason, num, **message))


def fails(status: int, value: Any = b"", **headers: str) -> Behaviour:
    """Replies with an error status."""
    return lambda h, _: h.reply(value, status, **headers)


def raw(data: bytes, **headers: str) -> Behaviour:
    """Replies with status 200 and exactly these bytes."""
    return lambda h, _: h.reply(data, **headers)


def breaks_off(h: Handler, _: dict[str, Any]) -> None:
    """Announces 900 bytes, sends 20 and closes the connection."""
    h.reply(json.dumps(chat()).encode()[:20], Content_Length="900")
    h.close_connection = True


def resets(h: Handler, _: dict[str, Any]) -> None:
    """Resets the connection instead of closing it."""
    h.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    h.close_connection = True
    h.connection.close()


def hangs_up(h: Handler, _: dict[str, Any]) -> None:
    """Closes the connection without a reply."""
    h.close_connection = True


def babble(h: Handler, body: dict[str, Any]) -> None:
    """Imitates a model: numbers drawn from the seed and the messages, as many as max_tokens."""
    rng = random.Random(json.dumps([body["seed"], body["messages"]]))
    tokens = [rng.randrange(50) for _ in range(body["max_tokens"])]
    h.reply(chat(spell(tokens), "length", len(tokens)))


@contextmanager
def serving() -> Iterator[FakeServer]:
    """Runs a fake server in a thread."""
    with FakeServer() as fake:
        threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield fake
        fake.shutdown()
