"""What clients of HTTP servers have in common: addresses, replies, errors and headers, read from text.

The connection is the caller's: the server engine has threads, a judge has an event loop.
"""

from __future__ import annotations

import email.utils
import json
import math
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from cohort.errors import ConfigError
from cohort.system import json_text

MAX_QUOTED_CHARACTERS = 300  # of a server's own text in a message
RETRYABLE_STATUSES = (408, 425, 429)  # besides 5xx: statuses after which another try may succeed
REDIRECT_STATUSES = (301, 302, 303, 307, 308)


class RetryableError(Exception):
    """A failed try that may succeed when repeated.

    `unreachable` says that no server answered. `pause_seconds` is the pause that the server asks for; None = it asks
    for none.
    """

    def __init__(self, text: str, pause_seconds: float | None = None, unreachable: bool = False) -> None:
        super().__init__(text)
        self.pause_seconds, self.unreachable = pause_seconds, unreachable


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpReply:
    """A server's reply to one call. Headers that it lacks are ""."""

    status: int
    data: bytes
    retry_after: str
    location: str


def clean_text(text: str, key: str = "") -> str:
    """Returns `text` as one line for a message, with [key] for the API key and without control characters.

    `key` "" = there is none. Each run of spaces becomes one. What is longer than MAX_QUOTED_CHARACTERS is cut and ends
    with "...".
    """
    # Some servers repeat the key in their error message.
    text = text.replace(key, "[key]") if key else text
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= MAX_QUOTED_CHARACTERS else f"{line[:MAX_QUOTED_CHARACTERS]}..."


def parse_json(data: bytes) -> Any:
    """Returns the JSON value in `data`, or None if it is no valid JSON (or the JSON value null)."""
    try:
        return json_text.parse_json(data)
    except ValueError:
        return None


def find_error_message(value: Any, reply: HttpReply) -> str:
    """Returns the message in an error reply. `value` is the JSON of the reply; None = it has none.

    It is the first of `error`, `message` and `detail` in the JSON object that is not empty, and of an `error` object
    its `message`; what is no string is written as JSON; "" if there is none. A reply with a Location header gives
    "moved to ...", a reply without a JSON object the beginning of its own text.
    """
    if reply.location:
        return f"moved to {reply.location}"
    if not isinstance(value, dict):
        return reply.data[: 4 * MAX_QUOTED_CHARACTERS].decode(errors="replace")
    error = value.get("error") or value.get("message") or value.get("detail") or ""
    if isinstance(error, dict):
        error = error.get("message") or error
    return error if isinstance(error, str) else json.dumps(error)


def parse_retry_after(header: str) -> float | None:
    """Returns the seconds to wait that a Retry-After header asks for, as a number or a date, at least 0.

    Returns None if the header is neither, or infinite.

    >>> parse_retry_after("7"), parse_retry_after("-1"), parse_retry_after("soon"), parse_retry_after("")
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


def normalise_url(url: str, key_place: str = "the environment variable COHORT_API_KEY", setting: str = "url") -> str:
    """Returns a server's address without spaces around it and without a final /v1 or slash.

    For messages, `key_place` says where an API key belongs, and `setting` what holds the address. Raises ConfigError
    for a text that is no http or https address, or has a user, a password, a query or a fragment.

    >>> normalise_url("http://localhost:8000/v1/")
    'http://localhost:8000'
    """
    url = url.strip()
    # First of all, because the other messages repeat the address.
    if "@" in url.partition("//")[2].partition("/")[0]:
        raise ConfigError(
            "the server's url must not hold a user or a password; remove all before and including the @, and put the "
            f"API key into {key_place}."
        )
    wrong = ConfigError(f'{setting} = "{url}" is no address of a server; write it like http://localhost:8000')
    try:
        where = urlsplit(url)
        plausible = where.scheme in ("http", "https") and where.hostname and where.port != 0
    except ValueError as e:
        # The port is no number, or a bracket is missing.
        raise wrong from e
    if not plausible or where.query or where.fragment or not (url.isascii() and url.isprintable()) or " " in url:
        raise wrong
    return f"{where.scheme}://{where.netloc}{where.path.rstrip('/').removesuffix('/v1')}"


def is_openai(url: str) -> bool:
    """Returns whether the address is one of OpenAI's own servers: openai.com or a host below it."""
    host = urlsplit(url).hostname or ""
    return host == "openai.com" or host.endswith(".openai.com")
