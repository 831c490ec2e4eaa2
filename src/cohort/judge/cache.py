"""Replies of judges on disk, by the content of their request: equal requests are paid for once.

An entry has the judge's words and a checksum, so that a damaged one counts as none. It has no key, and no request.
Several processes may write: an entry is made aside and renamed, and equal requests have one name.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from cohort.system.cache import cache_root
from cohort.system.json_text import parse_json


def digest_request(url: str, body: dict[str, Any]) -> str:
    """Returns 32 hexadecimal digits of a hash over the address and the whole body of a request."""
    text = json.dumps([url, body], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def recall_reply(digest: str) -> str | None:
    """Returns the reply that is stored for a request; None if there is none or it is damaged."""
    try:
        line, _, checksum = _locate_entry(digest).read_text(encoding="utf-8").partition("\n")
        reply = parse_json(line)["reply"]
        return reply if isinstance(reply, str) and checksum == _compute_checksum(line) else None
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):
        return None


def remember_reply(digest: str, reply: str) -> None:
    """Stores the reply to a request. Does nothing if the cache cannot be written."""
    line = json.dumps({"reply": reply})
    # RuntimeError: there is no home folder.
    with suppress(OSError, RuntimeError):
        entry = _locate_entry(digest)
        entry.parent.mkdir(parents=True, exist_ok=True)
        aside = entry.with_name(f".{entry.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            # Not synced to disk: that takes milliseconds of the event loop, and the checksum finds what a power cut
            # left half written.
            aside.write_text(f"{line}\n{_compute_checksum(line)}", encoding="utf-8")
            os.replace(aside, entry)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def _locate_entry(digest: str) -> Path:
    """Returns the path of the file for a request. It need not exist."""
    return cache_root() / "judge" / digest[:2] / f"{digest}.json"


def _compute_checksum(line: str) -> str:
    """Returns 16 hexadecimal digits that show whether a line is as it was written."""
    return hashlib.sha256(line.encode()).hexdigest()[:16]
