"""Requests to a judge's server: limits on how many, retries with pauses, the key, and the cache of replies.

The key is sent to the server and appears nowhere else: not in messages and not in the cache. A server may repeat it,
also in another form, such as base64.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

from cohort.errors import ServiceError
from cohort.judge.cache import digest_request, recall_reply, remember_reply
from cohort.system.http_connection import ConnectionPool
from cohort.system.http_text import (
    REDIRECT_STATUSES,
    RETRYABLE_STATUSES,
    HttpReply,
    RetryableError,
    clean_text,
    find_error_message,
    parse_json,
    parse_retry_after,
)
from cohort.system.secrets import Secrets
from cohort.tasks.draws import Draws

FIRST_PAUSE_SECONDS = 1.0  # after the first failed try; it doubles with each
MAX_PAUSE_SECONDS = 60.0  # of our own, and that a server may ask for

T = TypeVar("T")


class UnreadableReply(RetryableError):
    """A reply of the judge from which no score can be read."""


class Clock:
    """The time, and how to wait. Tests have one of their own."""

    def get_seconds(self) -> float:
        """Returns seconds since an arbitrary moment."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        await asyncio.sleep(seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """What requests to one server have in common. `url` ends before /chat/completions, and `key` names a variable."""

    url: str
    path: str
    key: str = ""
    seconds: float = 120.0
    retries: int = 4
    requests_per_minute: float = 0.0
    concurrency: int = 64
    cache: bool = True


class RateLimit:
    """Lets requests begin one after the other, `per_minute` of them at most and evenly spaced; 0 = no limit."""

    def __init__(self, per_minute: float, clock: Clock) -> None:
        self._spacing = 60.0 / per_minute if per_minute else 0.0
        self._clock = clock
        self._next = clock.get_seconds()
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Waits until the next request may begin."""
        if not self._spacing:
            return
        # The lock keeps the order, and a request that is cancelled while it waits takes no place.
        async with self._turn:
            if (missing := self._next - self._clock.get_seconds()) > 0:
                await self._clock.sleep(missing)
            self._next = max(self._next, self._clock.get_seconds()) + self._spacing


class LoopState:
    """What a service has in one event loop: places for requests, connections, and a lock per request under way."""

    def __init__(self, config: ServiceConfig, clock: Clock) -> None:
        self.places = asyncio.Semaphore(config.concurrency)
        self.pool = ConnectionPool(config.url)
        self.rate = RateLimit(config.requests_per_minute, clock)
        self.locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()


class Service:
    """The server of a judge."""

    def __init__(self, config: ServiceConfig, clock: Clock | None = None) -> None:
        self.config = config
        self.clock = clock or Clock()
        self._loops: dict[asyncio.AbstractEventLoop, LoopState] = {}

    async def ask(self, body: dict[str, Any], read: Callable[[str], T], reminder: str) -> T:
        """Returns what `read` makes of the judge's reply to `body`, a request with messages.

        `read` raises UnreadableReply for a reply that breaks the rules. The judge is then asked again, with `reminder`
        after the last message. A reply that was read is stored, if the config says so. Raises ServiceError if no try
        gave a reply that can be read, and at once for what another try cannot change.
        """
        state = self._get_state()
        if not self.config.cache:
            return (await self._try_repeatedly(state, body, read, reminder))[0]
        digest = digest_request(self.config.url, body)
        lock = state.locks.setdefault(digest, asyncio.Lock())
        # Equal answers are common in a group. The first one asks, the others find its reply.
        async with lock:
            if (known := recall_reply(digest)) is not None:
                try:
                    return read(known)
                except UnreadableReply:
                    # Written under other rules.
                    pass
            value, text = await self._try_repeatedly(state, body, read, reminder)
            remember_reply(digest, text)
            return value

    def _get_state(self) -> LoopState:
        """Returns the state of the running event loop, made at its first request."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            # Loops that have ended are dropped with all that was theirs.
            self._loops = {other: state for other, state in self._loops.items() if not other.is_closed()}
            self._loops[loop] = LoopState(self.config, self.clock)
        return self._loops[loop]

    async def _try_repeatedly(
        self, state: LoopState, body: dict[str, Any], read: Callable[[str], T], reminder: str
    ) -> tuple[T, str]:
        """Returns what `read` makes of the reply, and the reply itself. Raises as `ask` does.

        The pauses between tries grow. They are as random as a hash of the request, so that not all requests come back
        at the same moment, and the same request behaves the same each time.
        """
        key = read_key(self.config.key)
        secrets = Secrets([self.config.key] if key else [], label="key")
        draws = Draws("judge pause", digest_request(self.config.url, body))
        sent = body
        with explaining_cancellation() as failures:
            for n in range(self.config.retries + 1):
                try:
                    # Entered before the wait for a place: the next request uses the connection of one that has ended.
                    with state.pool.keep_open():
                        text = await self._send(state, sent, key, secrets)
                    return read(text), text
                except RetryableError as error:
                    failures.append(error)
                    if n == self.config.retries:
                        raise self._make_final_error(n + 1, error) from error
                    if isinstance(error, UnreadableReply):
                        *before, last = body["messages"]
                        sent = body | {"messages": [*before, {**last, "content": f"{last['content']}\n\n{reminder}"}]}
                        continue
                    usual = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**n)
                    asked = error.pause_seconds or 0.0
                    # A pause that the server asks for is never shortened.
                    await self.clock.sleep(max(asked, usual / 2) + draws.below(1000) / 1000 * usual / 2)
        raise AssertionError("the last try returns or raises")

    def _make_final_error(self, tries: int, error: RetryableError) -> ServiceError:
        """Returns the error for a request whose last try failed with `error`."""
        times = "once" if tries == 1 else f"{tries} times"
        if isinstance(error, UnreadableReply):
            remedy = "Use a model that follows instructions, raise max_tokens of the judge, or set json=True"
        else:
            remedy = "Make sure that the server runs and is not overloaded: lower its load with requests_per_minute"
        return ServiceError(f"the judge at {self.config.url} failed {times}; the last error was: {error}. {remedy}.")

    async def _send(self, state: LoopState, body: dict[str, Any], key: str, secrets: Secrets) -> str:
        """Sends a request once and returns the text of the reply, from which `secrets`, the key, are removed.

        Raises RetryableError if another try may succeed, ServiceError if not.
        """
        config = self.config
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "cohort"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        async with state.places:
            await state.rate.wait()
            try:
                async with asyncio.timeout(config.seconds):
                    reply = await state.pool.send("POST", config.path, json.dumps(body).encode(), headers)
            except TimeoutError as error:
                raise RetryableError(f"no reply within {config.seconds:g} seconds") from error
            except ssl.SSLCertVerificationError as error:
                raise ServiceError(
                    f"{config.url} has no certificate that can be trusted: {error.verify_message}. Correct the judge's "
                    "url, or set the environment variable SSL_CERT_FILE to a file with the server's certificate, and "
                    "hand it to the scoring workers with --scoring.env SSL_CERT_FILE.",
                    lasting=True,
                ) from error
            except EOFError as error:
                raise RetryableError("the connection ended before the reply did", unreachable=True) from error
            except (OSError, ValueError) as error:
                words = clean_text(secrets.remove_from(f"{type(error).__name__}: {error}".removesuffix(": ")))
                raise RetryableError(words, unreachable=True) from error
        return secrets.remove_from(read_content(self._read_json(reply, secrets), body))

    def _read_json(self, reply: HttpReply, secrets: Secrets) -> Any:
        """Returns the JSON value of a reply. Raises as `_send` does for one that reports an error or is no JSON."""
        value, status = parse_json(reply.data), reply.status
        if 200 <= status < 300:
            if value is None:
                # Removed before it is cut: a part of a key would not be found.
                start = clean_text(secrets.remove_from(reply.data.decode(errors="replace"))[:80])
                raise RetryableError(f'a reply of {len(reply.data)} bytes that is no JSON: "{start}"')
            # Some servers report an error with status 200; its code then takes the place of the status.
            error = value.get("error") if isinstance(value, dict) else None
            if not error:
                return value
            status = error["code"] if isinstance(error, dict) and isinstance(error.get("code"), int) else 500
        words = clean_text(secrets.remove_from(f"{status} {find_error_message(value, reply)}"))
        if status not in RETRYABLE_STATUSES and status < 500:
            raise_refusal(self.config, status, words)
        pause = parse_retry_after(reply.retry_after)
        if pause is not None and pause > MAX_PAUSE_SECONDS:
            raise ServiceError(
                f"the judge at {self.config.url} asks for a pause of {pause:.0f} seconds: {words}. Wait, raise the "
                "limit of your account, or lower requests_per_minute of the judge."
            )
        raise RetryableError(words, pause_seconds=pause)


@contextmanager
def explaining_cancellation() -> Iterator[list[RetryableError]]:
    """Yields a list of failed tries. If the block is cancelled, the last of them is added to the exception as a note.

    The scoring worker, which cancels what is over its time, shows the note.
    """
    failures: list[RetryableError] = []
    try:
        yield failures
    except asyncio.CancelledError as error:
        if failures:
            error.add_note(f"the judge's last error was: {failures[-1]}")
        raise


@cache
def get_service(config: ServiceConfig) -> Service:
    """Returns the service of a config. Judges with equal configs share it, and so its limits."""
    return Service(config)


def read_key(variable: str) -> str:
    """Returns the API key in the environment variable `variable`; "" if that is "".

    Raises ServiceError if the variable is not set, or holds what cannot be a key.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ServiceError(
            f"the judge reads its key from the environment variable {variable}, which is not set in this process. Set "
            f"it (export {variable}=...), and hand it to the scoring workers with --scoring.env {variable}.",
            lasting=True,
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ServiceError(
            f"the environment variable {variable} has a space, a line end or another character that no key has. Set it "
            "to the key alone.",
            lasting=True,
        )
    return key


def read_content(value: Any, body: dict[str, Any]) -> str:
    """Returns the text of a chat completion. Raises UnreadableReply if it was cut off, RetryableError if there is none.

    `body` is the request, for the message.
    """
    try:
        choice = value["choices"][0]
        content, finish = choice["message"].get("content"), choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError):
        raise RetryableError("a reply without choices[0].message.content") from None
    if finish == "length":
        # A number at the end may lack digits.
        limit = body.get("max_tokens", body.get("max_completion_tokens"))
        raise UnreadableReply(f"the judge's reply was cut off at max_tokens = {limit}")
    if finish == "content_filter":
        raise UnreadableReply("the server's filter cut the judge's reply")
    if not isinstance(content, str):
        raise RetryableError("a reply without choices[0].message.content")
    return content


def raise_refusal(config: ServiceConfig, status: int, words: str) -> NoReturn:
    """Raises ServiceError for a request that the server refused with this HTTP status.

    `words` are the status and the server's own message. What the error advises depends on the status.
    """
    if status in (401, 403) and config.key:
        advice = f"Set the environment variable {config.key} to an API key that this server accepts"
    elif status in (401, 403):
        advice = 'It wants an API key: put it into an environment variable and name that with key="NAME" of the judge'
    elif status == 404:
        advice = "Give the judge an url that ends before /chat/completions (usually in /v1), and a model that it serves"
    elif status in REDIRECT_STATUSES:
        advice = "Redirects are not followed: give the judge the new address as url"
    else:
        advice = "Change what the server objects to: model, max_tokens, temperature, or the length of the answers"
    raise ServiceError(f"the judge at {config.url} refuses: {words}. {advice}.", lasting=True)
