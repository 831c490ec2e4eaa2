"""A real HTTP server in the place of an OpenAI-compatible one, that can be told to misbehave."""

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


class Handler(BaseHTTPRequestHandler):
    """One connection. What it does with a question is the server's `behaviours`, the last one from then on."""

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
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content_Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class FakeServer(ThreadingHTTPServer):
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
        return [body for path, _, body in self.seen if path != "/v1/models"]

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that went away


def models(*names: str, owner: str = "somebody") -> Behaviour:
    return lambda h, _: h.reply({"object": "list", "data": [{"id": n, "owned_by": owner} for n in names]})


def chat(content: Any = "4", reason: Any = "stop", num: int = 2, **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": reason}
    return {"choices": [choice], "usage": {"completion_tokens": num}}


def answers(content: Any = "4", reason: Any = "stop", num: int = 2, **message: Any) -> Behaviour:
    return lambda h, _: h.reply(chat(content, reason, num, **message))


def fails(status: int, value: Any = b"", **headers: str) -> Behaviour:
    return lambda h, _: h.reply(value, status, **headers)


def raw(data: bytes, **headers: str) -> Behaviour:
    return lambda h, _: h.reply(data, **headers)


def breaks_off(h: Handler, _: dict[str, Any]) -> None:
    h.reply(json.dumps(chat()).encode()[:20], Content_Length="900")
    h.close_connection = True


def resets(h: Handler, _: dict[str, Any]) -> None:
    h.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    h.close_connection = True
    h.connection.close()


def hangs_up(h: Handler, _: dict[str, Any]) -> None:
    h.close_connection = True


def babble(h: Handler, body: dict[str, Any]) -> None:
    """A model: numbers drawn from the seed, as many as allowed, with stop strings."""
    rng = random.Random(json.dumps([body["seed"], body["messages"]]))
    tokens = [rng.randrange(50) for _ in range(body["max_tokens"])]
    h.reply(chat(spell(tokens), "length", len(tokens)))


@contextmanager
def serving() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield fake
        fake.shutdown()
