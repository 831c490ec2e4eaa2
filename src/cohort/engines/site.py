"""A client for a server that speaks JSON over HTTP, with an API key and retries after errors that may pass.

The key is sent to the server and appears nowhere else: not in messages, log lines or records. Redirects are not
followed and proxies are not used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from cohort.errors import ConfigError, EngineError, ModelError
from cohort.system.http_text import (
    REDIRECT_STATUSES,
    RETRYABLE_STATUSES,
    HttpReply,
    RetryableError,
    clean_text,
    find_error_message,
    is_openai,
    normalise_url,
    parse_json,
    parse_retry_after,
)

MAX_TRIES = 8
MAX_PAUSE_SECONDS = 120.0  # that a server may ask for
MAX_REPLY_BYTES = 1 << 26
MAX_WARNINGS = 10

log = logging.getLogger(__name__)

T = TypeVar("T")
PauseFunction = Callable[[threading.Event, float], object]
"""Waits until this many seconds have passed or the event is set."""


@dataclass(eq=False, kw_only=True, slots=True)
class HttpCall:
    """One call of the server. Any thread may cancel it."""

    method: str
    path: str  # after /v1/
    body: bytes | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    open_socket: socket.socket | None = None  # set while the server works on the call

    def cancel(self) -> None:
        """Makes the call end soon, whether it has not begun, pauses between two tries or waits for the reply.

        Any thread may call this; it does not wait for the end. The thread that sends the call gets an error, unless the
        reply had come already. An attempt to connect is not interrupted.
        """
        self.cancelled.set()
        if self.open_socket is not None:
            # An OSError here means that the call has just ended.
            with contextlib.suppress(OSError):
                # Wakes the thread that reads, and tells the server. SSLSocket's own version is not for two threads.
                socket.socket.shutdown(self.open_socket, socket.SHUT_RDWR)


class ServerClient:
    """The client of the server at `url`. Threads may share it, but each needs a connection of its own.

    `key` is the name of an environment variable ("" = the usual ones, see `read_api_key`). `timeout` is in seconds.
    """

    def __init__(self, url: str, key: str, timeout: float, pause: PauseFunction = threading.Event.wait) -> None:
        self.url = normalise_url(url)
        self.timeout, self.pause = timeout, pause
        self._key = read_api_key(self.url, key)
        self._lock = threading.Lock()  # guards _logged_warnings
        self._logged_warnings: set[str] = set()

    @property
    def is_openai(self) -> bool:
        """Whether `self.url` is one of OpenAI's own servers."""
        return is_openai(self.url)

    def make_connection(self) -> HTTPConnection:
        """Returns a new connection to the server. It connects at the first call."""
        where = urlsplit(self.url)
        kind = HTTPSConnection if where.scheme == "https" else HTTPConnection
        return kind(where.hostname or "", where.port, timeout=self.timeout)

    def send_with_retries(
        self, connection: HTTPConnection, call: HttpCall, read: Callable[[Any], T], retry_unreachable: bool = True
    ) -> T:
        """Sends a call and returns what the function `read` makes of the JSON in its reply.

        After a RetryableError, raised while sending or by `read`, it pauses (as long as the server asks, or about twice
        as long each time) and tries again; after MAX_TRIES tries or a cancel it raises EngineError. If the connection
        fails and `retry_unreachable` is False, it raises ModelError at once. Other errors of `_try_once` pass through.
        """
        for n in range(1, MAX_TRIES + 1):
            try:
                return read(self._try_once(connection, call))
            except RetryableError as error:
                connection.close()
                if error.unreachable and not retry_unreachable:
                    words = f"no server answers at {self.url} ({error}): start it, or correct its address."
                    raise ModelError(words) from error
                if n == MAX_TRIES or call.cancelled.is_set():
                    raise EngineError(
                        f"the server {self.url} failed {n} times; the last error was: {error}. Make sure that it runs "
                        "and has OpenAI's interface, then repeat the cohort eval command."
                    ) from error
                self.warn_once(f"is asked again after: {error}")
                # Random, so that not all threads ask again at the same moment.
                usual = 2 ** (n - 1) * random.uniform(0.5, 1.0)
                self.pause(call.cancelled, usual if error.pause_seconds is None else error.pause_seconds)
        raise AssertionError("the last try returns or raises")

    def _try_once(self, connection: HTTPConnection, call: HttpCall) -> Any:
        """Sends the call once and returns the JSON value of the reply.

        Raises RetryableError if another try may succeed: the connection failed, the reply is no JSON, or its status or
        error code is 5xx or in RETRYABLE_STATUSES. Raises ConfigError if the server refuses the call or has no trusted
        certificate, EngineError if it asks for a pause of more than MAX_PAUSE_SECONDS.
        """
        try:
            reply = self._send_and_receive(connection, call)
        except ssl.SSLCertVerificationError as e:
            raise ConfigError(
                f"{self.url} has no certificate that can be trusted: {e.verify_message}. Correct --url, or set the "
                "environment variable SSL_CERT_FILE to a file with the server's certificate."
            ) from e
        except (OSError, HTTPException) as e:
            text = self.clean_text(f"{type(e).__name__}: {e}".removesuffix(": "))
            raise RetryableError(text, unreachable=True) from e
        value, status = parse_json(reply.data), reply.status
        if 200 <= status < 300:
            if value is None:
                start = self.clean_text(reply.data[:80].decode(errors="replace"))
                raise RetryableError(f'a reply of {len(reply.data)} bytes that is no JSON: "{start}"')
            # Some servers report an error with status 200; its code then takes the place of the status.
            error = value.get("error") if isinstance(value, dict) else None
            if not error:
                return value
            status = error["code"] if isinstance(error, dict) and isinstance(error.get("code"), int) else 500
        words = self.clean_text(f"{status} {find_error_message(value, reply)}")
        if status not in RETRYABLE_STATUSES and status < 500:
            raise_refusal(f"{self.url}/v1/{call.path}", status, words)
        pause = parse_retry_after(reply.retry_after)
        if pause is not None and pause > MAX_PAUSE_SECONDS:
            raise EngineError(
                f"the server {self.url} asks for a pause of {pause:.0f} seconds: {words}. Repeat the cohort eval "
                "command after that time; it keeps the answers that are finished."
            )
        raise RetryableError(words, pause_seconds=pause)

    def _send_and_receive(self, connection: HTTPConnection, call: HttpCall) -> HttpReply:
        """Sends the call, with the API key, over the connection and returns the reply, whatever its status is.

        Raises OSError or HTTPException if the connection fails, the reply is cut off or too long, or the call is
        cancelled.
        """
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "cohort"}
        # Local servers usually need no key.
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        if connection.sock is None:
            connection.connect()
        # The socket is published before the test: a cancel after the test finds it and shuts it down.
        call.open_socket = connection.sock
        try:
            if call.cancelled.is_set():
                raise ConnectionAbortedError("cancelled")
            connection.request(call.method, f"{urlsplit(self.url).path}/v1/{call.path}", call.body, headers)
            response = connection.getresponse()
            data = response.read(MAX_REPLY_BYTES + 1)
        finally:
            call.open_socket = None
        if len(data) > MAX_REPLY_BYTES:
            raise HTTPException(f"the reply is longer than {MAX_REPLY_BYTES >> 20} MiB")
        # `length` counts the bytes that were announced and did not come.
        if response.length:
            raise HTTPException(f"the reply breaks off after {len(data)} bytes")
        pause, location = (response.headers.get(name, "") for name in ("Retry-After", "Location"))
        return HttpReply(status=response.status, data=data, retry_after=pause, location=location)

    def clean_text(self, text: str) -> str:
        """Returns `text` as one line for a message, as `clean_text` of `system.http_text` does, without the API key."""
        return clean_text(text, self._key)

    def warn_once(self, text: str) -> None:
        """Logs the warning "URL text". Does nothing if it was logged before, or if MAX_WARNINGS others were."""
        with self._lock:
            if text in self._logged_warnings or len(self._logged_warnings) == MAX_WARNINGS:
                return
            self._logged_warnings.add(text)
        log.warning("%s %s", self.url, text)


def raise_refusal(address: str, status: int, words: str) -> NoReturn:
    """Raises ConfigError for a call of `address` that the server refused with this HTTP status.

    `words` are the status and the server's own message. What the error advises depends on the status.
    """
    if status in (401, 403):
        raise ConfigError(
            f"the server at {address} refuses: {words}. Set the environment variable COHORT_API_KEY to an API "
            "key that this server accepts."
        )
    if status == 404:
        raise ConfigError(
            f"the server at {address} refuses: {words}. Give as --url the part of the server's address before /v1, "
            "and as --model a model that it serves."
        )
    if status in REDIRECT_STATUSES:
        raise ConfigError(
            f"the server at {address} refuses: {words}. Redirects are not followed: give the new address as --url."
        )
    raise ConfigError(
        f"the server at {address} refuses: {words}. Change what the server objects to: the model's name, the "
        "prompt's length or a sampling setting."
    )


def read_api_key(url: str, variable: str) -> str:
    """Returns the API key for the server at `url` from the environment; "" = there is none.

    `variable` is the name of the environment variable; "" = COHORT_API_KEY, then, for OpenAI's own servers only,
    OPENAI_API_KEY. An empty variable counts as not set. Raises ConfigError if the given variable is not set or the key
    has impossible characters. The message does not repeat the variable's name, because users may give the key itself
    by mistake.
    """
    # OpenAI's key must not be sent to other servers.
    names = [variable] if variable else ["COHORT_API_KEY", *(["OPENAI_API_KEY"] if is_openai(url) else [])]
    key = next((value for name in names if (value := os.environ.get(name, "").strip())), "")
    if variable and not key:
        raise ConfigError(
            "the argument key of the server engine names an environment variable that is not set or empty. Put the API "
            "key into a variable and give its name, not the key itself."
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            "the API key has a space, a line end or another character that no key has. Set the environment variable "
            "that it is read from (COHORT_API_KEY, or for OpenAI OPENAI_API_KEY) to the key alone."
        )
    return key
