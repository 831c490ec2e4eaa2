"""A server at an address: JSON over HTTP, with a key, tried again after trouble that may pass.

The key is sent to the server and nowhere else: no message, log line or record has it. Redirects are not followed and
proxies not used.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import logging
import math
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

from cohort.errors import ConfigError, EngineError, ModelError

TRIES = 8
LONGEST_PAUSE = 120.0  # seconds a server may ask for
LONGEST_REPLY = 1 << 26  # bytes
LONGEST_WORDS = 300  # characters of a server's own words in a message
MOST_WARNINGS = 10
PASSING = (408, 425, 429)  # besides 5xx: statuses after which another try may succeed
KEY_HINT = ". The key is read from COHORT_API_KEY, or from the variable that `key` names"
HINTS = {401: KEY_HINT, 403: KEY_HINT, 404: ". Is url the part of the address before /v1?"}

log = logging.getLogger(__name__)

T = TypeVar("T")
Pause = Callable[[threading.Event, float], object]
"""Wait so many seconds, or until the event."""


class Trouble(Exception):
    """A try failed in a way that another may not: no server was there (`lost`), or it asks for a pause, in seconds."""

    def __init__(self, text: str, pause: float | None = None, lost: bool = False) -> None:
        super().__init__(text)
        self.pause, self.lost = pause, lost


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What came back."""

    status: int
    data: bytes
    retry_after: str
    location: str


@dataclass(eq=False, kw_only=True, slots=True)
class Call:
    """Something asked of the server. Any thread may cancel it."""

    method: str
    path: str  # after /v1/
    body: bytes | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    line: socket.socket | None = None  # open while the server works on it

    def cancel(self) -> None:
        self.cancelled.set()
        if self.line is not None:
            with contextlib.suppress(OSError):  # it has just ended
                # Wakes the thread that reads, and tells the server. SSLSocket's own version is not for two threads.
                socket.socket.shutdown(self.line, socket.SHUT_RDWR)


class Site:
    """The server at `url`. Not to be shared between threads are the connections alone."""

    def __init__(self, url: str, key: str, timeout: float, pause: Pause = threading.Event.wait) -> None:
        self.url = checked_url(url)
        self.timeout, self.pause = timeout, pause
        self._key = find_key(self.url, key)
        self._lock = threading.Lock()  # of what was told
        self._told: set[str] = set()

    @property
    def is_openai(self) -> bool:
        return is_openai(self.url)

    def connection(self) -> HTTPConnection:
        where = urlsplit(self.url)
        kind = HTTPSConnection if where.scheme == "https" else HTTPConnection
        return kind(where.hostname or "", where.port, timeout=self.timeout)

    def ask(self, connection: HTTPConnection, call: Call, read: Callable[[Any], T], patient: bool = True) -> T:
        """What `read` finds in the reply. Tries again after trouble; without patience only if a server is there."""
        for n in range(1, TRIES + 1):
            try:
                return read(self._exchange(connection, call))
            except Trouble as trouble:
                connection.close()
                if trouble.lost and not patient:
                    words = f"no server answers at {self.url} ({trouble}): start it, or mend its address."
                    raise ModelError(words) from trouble
                if n == TRIES or call.cancelled.is_set():
                    raise EngineError(f"{self.url} failed {n} times, at last so: {trouble}") from trouble
                self.warn(f"is asked again after: {trouble}")
                usual = 2 ** (n - 1) * random.uniform(0.5, 1.0)  # not all threads at once
                self.pause(call.cancelled, usual if trouble.pause is None else trouble.pause)
        raise AssertionError("the last try returns or raises")

    def _exchange(self, connection: HTTPConnection, call: Call) -> Any:
        """One try: the JSON of the reply."""
        try:
            reply = self._send(connection, call)
        except ssl.SSLCertVerificationError as e:
            raise ConfigError(f"{self.url} has no certificate that can be trusted: {e.verify_message}.") from e
        except (OSError, HTTPException) as e:
            raise Trouble(self.clean(f"{type(e).__name__}: {e}".removesuffix(": ")), lost=True) from e
        value, status = parsed(reply.data), reply.status
        if 200 <= status < 300:
            if value is None:
                start = self.clean(reply.data[:80].decode(errors="replace"))
                raise Trouble(f'a reply of {len(reply.data)} bytes that is no JSON: "{start}"')
            error = value.get("error") if isinstance(value, dict) else None
            if not error:
                return value
            status = error["code"] if isinstance(error, dict) and isinstance(error.get("code"), int) else 500
        words = self.clean(f"{status} {message_of(value, reply)}")
        if status not in PASSING and status < 500:
            raise ConfigError(f"{self.url}/v1/{call.path} refuses: {words}{HINTS.get(status, '')}")
        pause = retry_after(reply.retry_after)
        if pause is not None and pause > LONGEST_PAUSE:
            raise EngineError(f"{self.url} asks for a pause of {pause:.0f} seconds: {words}")
        raise Trouble(words, pause=pause)

    def _send(self, connection: HTTPConnection, call: Call) -> Reply:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "cohort"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        if connection.sock is None:
            connection.connect()
        call.line = connection.sock
        try:
            if call.cancelled.is_set():
                raise ConnectionAbortedError("cancelled")
            connection.request(call.method, f"{urlsplit(self.url).path}/v1/{call.path}", call.body, headers)
            response = connection.getresponse()
            data = response.read(LONGEST_REPLY + 1)
        finally:
            call.line = None
        if response.length or len(data) > LONGEST_REPLY:
            raise HTTPException(f"the reply breaks off after {len(data)} bytes")
        asked, moved = (response.headers.get(name, "") for name in ("Retry-After", "Location"))
        return Reply(status=response.status, data=data, retry_after=asked, location=moved)

    def clean(self, text: str) -> str:
        """A server's words, fit for a message: one line, no control characters, not the key."""
        text = text.replace(self._key, "[key]") if self._key else text
        line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return line if len(line) <= LONGEST_WORDS else f"{line[:LONGEST_WORDS]}..."

    def warn(self, text: str) -> None:
        """Log a warning, once."""
        with self._lock:
            if text in self._told or len(self._told) == MOST_WARNINGS:
                return
            self._told.add(text)
        log.warning("%s %s", self.url, text)


def parsed(data: bytes) -> Any:
    """The JSON value; None where there is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def message_of(value: Any, reply: Reply) -> str:
    """What an error reply says, in the places where servers say it."""
    if reply.location:
        return f"moved to {reply.location}"
    if not isinstance(value, dict):
        return reply.data[: 4 * LONGEST_WORDS].decode(errors="replace")
    error = value.get("error") or value.get("message") or value.get("detail") or ""
    if isinstance(error, dict):
        error = error.get("message") or error
    return error if isinstance(error, str) else json.dumps(error)


def retry_after(header: str) -> float | None:
    """Seconds to wait, from a number or a date; None if there is neither.

    >>> retry_after("7"), retry_after("-1"), retry_after("soon"), retry_after("")
    (7.0, 0.0, None, None)
    """
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def checked_url(url: str) -> str:
    """The address without /v1 and slashes at its end; raises for one that cannot be.

    >>> checked_url("http://localhost:8000/v1/")
    'http://localhost:8000'
    """
    url = url.strip()
    wrong = ConfigError(f'url = "{url}" is no address of a server; write it like http://localhost:8000')
    try:
        where = urlsplit(url)
        plausible = where.scheme in ("http", "https") and where.hostname and where.port != 0
    except ValueError as e:  # of a port, or of brackets
        raise wrong from e
    if "@" in where.netloc:
        raise ConfigError("url must not hold a user or a password; the key is read from the environment.")
    if not plausible or where.query or where.fragment or not (url.isascii() and url.isprintable()) or " " in url:
        raise wrong
    return f"{where.scheme}://{where.netloc}{where.path.rstrip('/').removesuffix('/v1')}"


def is_openai(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host == "openai.com" or host.endswith(".openai.com")


def find_key(url: str, variable: str) -> str:
    """The API key, "" for none. No message has it, nor the variable's name, which may be the key by mistake."""
    names = [variable] if variable else ["COHORT_API_KEY", *(["OPENAI_API_KEY"] if is_openai(url) else [])]
    found = next((value for name in names if (value := os.environ.get(name, "").strip())), "")
    if variable and not found:
        raise ConfigError("key names an environment variable that is not set; give its name, not the key itself.")
    if not (found.isascii() and found.isprintable()) or " " in found:
        raise ConfigError("the API key has a space, a line end or another character that no key has; set it again.")
    return found
