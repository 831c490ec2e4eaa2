"""A small HTTP client for an event loop: one request at a time per connection, many connections in one thread.

Threads are avoided on purpose. The C library reserves up to 64 MiB of address space for each thread, and a scoring
worker has 1 GiB in all. Certificates are verified. Redirects are not followed and proxies are not used.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import re
import socket
import ssl
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cohort.system.http_text import HttpReply

MAX_REPLY_BYTES = 1 << 24  # unless a pool allows more
MAX_HEADER_BYTES = 1 << 16
CONNECT_SECONDS = 10.0  # for one address of a server; then the next one is tried


@dataclass(eq=False, kw_only=True, slots=True)
class Connection:
    """An open connection to a server."""

    reader: StreamReader
    writer: StreamWriter
    num_replies: int = 0  # that have come over it

    def close(self) -> None:
        """Closes the connection without waiting for the server."""
        self.writer.transport.abort()


class ConnectionPool:
    """Connections to the server at `url`, in one event loop. Those that are idle stay open in `keep_open`.

    `socket_path` is the Unix socket on which the server listens; None = it listens on the host and port of `url`.
    """

    def __init__(self, url: str, socket_path: Path | None = None, max_reply_bytes: int = MAX_REPLY_BYTES) -> None:
        where = urlsplit(url)
        self._max_reply_bytes = max_reply_bytes
        self._socket_path = socket_path
        self._host, self._tls = where.hostname or "", where.scheme == "https"
        self._port = where.port or (443 if self._tls else 80)
        self._host_header = where.netloc
        self._idle: list[Connection] = []
        self._num_blocks = 0  # of `keep_open`
        self._context: ssl.SSLContext | None = None
        self._addresses: list[str] = []
        self._lookup = asyncio.Lock()

    async def send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> HttpReply:
        """Sends a request, GET or POST, and returns the reply, whatever its status is.

        Raises OSError, EOFError or ValueError if the connection fails, or the reply is cut off, too long or not HTTP.
        """
        return await self._exchange(self._make_request(method, path, body, headers))

    @contextmanager
    def keep_open(self) -> Iterator[None]:
        """Keeps connections open for further requests until the last such block ends."""
        self._num_blocks += 1
        try:
            yield
        finally:
            self._num_blocks -= 1
            # An event loop may end at any time after this, and connections must not outlive it.
            while not self._num_blocks and self._idle:
                self._idle.pop().close()

    def _make_request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Returns the bytes of a request."""
        fields = {"Host": self._host_header, "Content-Length": str(len(body)), "Accept-Encoding": "identity", **headers}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        return "\r\n".join(lines).encode("latin-1") + body

    async def _exchange(self, request: bytes) -> HttpReply:
        """Sends the bytes of a request over an idle or a new connection and returns the reply."""
        while True:
            connection = self._idle.pop() if self._idle else await self._open()
            try:
                connection.writer.write(request)
                await connection.writer.drain()
                reply, stays_open = await read_reply(connection.reader, self._max_reply_bytes)
            except (ConnectionError, IncompleteReadError) as error:
                connection.close()
                # Servers close idle connections. One that gave nothing for this request was closed before it.
                has_begun = isinstance(error, IncompleteReadError) and error.partial
                if has_begun or not connection.num_replies:
                    raise
                continue
            except BaseException:
                connection.close()
                raise
            connection.num_replies += 1
            if stays_open and self._num_blocks:
                self._idle.append(connection)
            else:
                connection.close()
            return reply

    async def _open(self) -> Connection:
        """Returns a new connection to the first address of the server that can be reached. Raises OSError if none can.

        The error is that of the last address.
        """
        if self._socket_path is not None:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_unix_connection(str(self._socket_path), limit=MAX_HEADER_BYTES)
            return Connection(reader=reader, writer=writer)
        if self._tls and self._context is None:
            self._context = ssl.create_default_context()
        last_error: OSError = ConnectionError(f"{self._host} has no address")
        for address in await self._find_addresses():
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    reader, writer = await asyncio.open_connection(
                        address,
                        self._port,
                        limit=MAX_HEADER_BYTES,
                        ssl=self._context,
                        server_hostname=self._host if self._tls else None,
                    )
                return Connection(reader=reader, writer=writer)
            except OSError as error:
                last_error = error
        # The server may have moved.
        self._addresses = []
        raise last_error

    async def _find_addresses(self) -> list[str]:
        """Returns the IP addresses of the server. They are looked up once, by one request for all others."""
        async with self._lookup:
            if not self._addresses:
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                self._addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
        return self._addresses


async def read_reply(reader: StreamReader, limit: int = MAX_REPLY_BYTES) -> tuple[HttpReply, bool]:
    """Returns the next HTTP reply of a stream, and whether the connection can be used again.

    Raises IncompleteReadError if the stream ends before the reply does, ValueError for what is no HTTP or has a body of
    more than `limit` bytes.
    """
    status = 100
    while 100 <= status < 200:
        # A server may announce the reply with replies of its own.
        status, headers = await _read_head(reader)
    length = headers.get("Content-Length", "")
    stays_open = headers.get("Connection", "").lower() != "close"
    if status in (204, 304):
        data = b""
    elif "chunked" in headers.get("Transfer-Encoding", "").lower():
        data = await _read_chunks(reader, limit)
    elif length:
        size = int(length) if re.fullmatch("[0-9]{1,18}", length) else -1
        data = await reader.readexactly(_check_size(size, limit))
    else:
        # The end of the connection is the end of the reply. The reader keeps little, so it is read in pieces.
        stays_open, parts = False, bytearray()
        while piece := await reader.read(MAX_HEADER_BYTES):
            parts += piece
            _check_size(len(parts), limit)
        data = bytes(parts)
    reply = HttpReply(
        status=status,
        data=data,
        retry_after=headers.get("Retry-After", ""),
        location=headers.get("Location", ""),
    )
    return reply, stays_open


async def _read_head(reader: StreamReader) -> tuple[int, http.client.HTTPMessage]:
    """Returns the status and the headers of a reply. Raises ValueError if it does not begin as HTTP/1 does."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError as error:
        raise ValueError(f"the headers of the reply are longer than {MAX_HEADER_BYTES >> 10} KiB") from error
    first, _, rest = head.partition(b"\r\n")
    found = re.match(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: |$)", first)
    if found is None:
        raise ValueError("the reply is not HTTP/1")
    try:
        headers = http.client.parse_headers(io.BytesIO(rest))
    except http.client.HTTPException as error:
        raise ValueError(f"the headers of the reply cannot be read: {error}") from error
    if first.startswith(b"HTTP/1.0") and "Connection" not in headers:
        headers["Connection"] = "close"
    return int(found[1]), headers


async def _read_chunks(reader: StreamReader, limit: int) -> bytes:
    """Returns a body that comes in chunks, each after its length. Raises ValueError for a wrong length."""
    data = bytearray()
    while True:
        line = await reader.readline()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,8}\s*(;.*)?\s*", line):
            raise ValueError("the reply has a chunk without a length")
        size = int(line.partition(b";")[0], 16)
        if not size:
            break
        _check_size(len(data) + size, limit)
        data += await reader.readexactly(size)
        await reader.readexactly(2)
    # Headers may follow the last chunk; an empty line ends them.
    while (await reader.readline()).strip():
        pass
    return bytes(data)


def _check_size(size: int, limit: int) -> int:
    """Returns the size of a reply in bytes. Raises ValueError if it is negative or more than `limit`."""
    if not 0 <= size <= limit:
        raise ValueError(f"the reply has no length or is longer than {limit >> 20} MiB")
    return size
