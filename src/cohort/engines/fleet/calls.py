"""Calls of a server that samples: JSON over HTTP, from one event loop, each with a time limit.

A server that fails is lost for its fleet (`ReplicaLost`), which starts it again or waits until it is back. A server
that refuses a call (`RefusedCall`) would refuse it again.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cohort.engines.fleet.base import ReplicaLost
from cohort.errors import ConfigError
from cohort.system.http_connection import ConnectionPool
from cohort.system.http_text import HttpReply, clean_text, find_error_message, normalise_url, parse_json

UNIX = "unix:"
# A completion of 128 thousand tokens, each with its log-probability.
MAX_REPLY_BYTES = 1 << 26
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


class FailedCall(ReplicaLost):
    """A call to which the server replied that it failed: it is there, and may answer others.

    `status` is that of HTTP; 200 = the reply was of no use.
    """

    def __init__(self, text: str, status: int = 200) -> None:
        super().__init__(text)
        self.status = status


class RefusedCall(Exception):
    """A server's refusal of a call, with its HTTP status (400 to 499). The text has status and reason."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a server listens: on a host and port, or on a Unix socket of this machine."""

    url: str  # http://host:port; for a Unix socket the host has no meaning
    socket_path: Path | None = None

    @property
    def is_local(self) -> bool:
        """Whether only programs of this machine can reach it."""
        host = urlsplit(self.url).hostname or ""
        return self.socket_path is not None or host in LOOPBACK_HOSTS or host.startswith("127.")

    def __str__(self) -> str:
        return self.url if self.socket_path is None else f"{UNIX}{self.socket_path}"


def read_address(text: str) -> Address:
    """Returns the address in a text as users write it. Raises ConfigError if it is none.

    >>> str(read_address("http://localhost:8000/")), str(read_address("unix:/run/vllm"))
    ('http://localhost:8000', 'unix:/run/vllm')
    """
    if not text.startswith(UNIX):
        return Address(url=normalise_url(text, setting="engine.urls"))
    path = Path(text.removeprefix(UNIX))
    if not path.is_absolute():
        raise ConfigError(f'engine.urls has "{text}"; write the whole path of the socket, like unix:/run/vllm.sock.')
    return Address(url="http://localhost", socket_path=path)


class ServerCalls:
    """The calls of one server. `key` is an API key; "" = none. It is sent to the server and appears nowhere else."""

    def __init__(self, address: Address, key: str = "") -> None:
        self.address = address
        self._key = key
        self._base_path = urlsplit(address.url).path
        self._pool = ConnectionPool(address.url, address.socket_path, MAX_REPLY_BYTES)
        self.keep_open = self._pool.keep_open

    async def get(self, path: str, seconds: float, purpose: str) -> Any:
        """Returns the JSON value that the server replies to a GET; None if the reply is empty. Raises as `post`."""
        return await self._send("GET", path, b"", seconds, purpose)

    async def post(self, path: str, body: Any, seconds: float, purpose: str) -> Any:
        """Returns the JSON value that the server replies to a POST with a JSON body; None if the reply is empty.

        `purpose` is what the server is to do, for messages, and begins with "to". Raises RefusedCall for a status of
        400 to 499, FailedCall for other errors and for what is no JSON, and ReplicaLost if the server cannot be
        reached or needs more than `seconds`.
        """
        return await self._send("POST", path, json.dumps(body).encode(), seconds, purpose)

    async def order(self, path: str, body: Any, seconds: float, purpose: str) -> None:
        """Sends a POST like `post`, whose reply says nothing besides success: it may be any text."""
        await self._send("POST", path, json.dumps(body).encode(), seconds, purpose, reads=False)

    async def _send(self, method: str, path: str, body: bytes, seconds: float, purpose: str, reads: bool = True) -> Any:
        """Sends a request and returns the JSON value of the reply. See `post`."""
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "cohort"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            async with asyncio.timeout(seconds) as limit:
                reply = await self._pool.send(method, f"{self._base_path}{path}", body, headers)
        except (OSError, EOFError, ValueError) as error:
            # The connection has a limit of its own.
            if limit.expired():
                raise ReplicaLost(f"needed more than {seconds:.0f} s {purpose}") from None
            if isinstance(error, ConnectionRefusedError):
                raise ReplicaLost(f"cannot be reached {purpose}: nothing listens there") from error
            words = clean_text(f"{type(error).__name__}: {error}".removesuffix(": "), self._key)
            raise ReplicaLost(f"cannot be reached {purpose} ({words})") from error
        return self._read(reply, purpose, reads)

    def _read(self, reply: HttpReply, purpose: str, reads: bool) -> Any:
        """Returns the JSON value of a reply, if `reads` says so. Raises RefusedCall or FailedCall. See `post`."""
        value = parse_json(reply.data)
        if 200 <= reply.status < 300:
            if reads and value is None and reply.data.strip() not in (b"", b"null"):
                start = clean_text(reply.data[:80].decode(errors="replace"), self._key)
                raise FailedCall(f'sent a reply of {len(reply.data)} bytes that is no JSON: "{start}"')
            return value
        words = clean_text(f"{reply.status} {find_error_message(value, reply)}", self._key)
        if 400 <= reply.status < 500 and reply.status not in (408, 429):
            raise RefusedCall(reply.status, words)
        raise FailedCall(f"failed {purpose}: {words}", reply.status)

    async def is_up(self, path: str, seconds: float, title: str) -> bool:
        """Returns whether the server replies to a GET with success; False = it says that it is not ready yet.

        `title` is the kind of server that it should be. Raises ReplicaLost while it cannot be reached, and ConfigError
        if what replies is no such server.
        """
        try:
            await self.get(path, seconds, "to say whether it is ready")
        except FailedCall as failed:
            if failed.status >= 500:
                return False
            raise ConfigError(f"the server {self.address} {failed}. Is it {title}'s server?") from failed
        return True
