"""Removes the values of environment variables from texts.

A worker may be given variables by name (`--scoring.env`). Their values must not reach anything that a run writes or
prints. So every text that leaves a worker is searched for them, and in the command's own process what exceptions of a
user's code say (`hide_variables`).
"""

from __future__ import annotations

import base64
import html
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote, quote_plus

# Shorter values, such as "eu" or "1", are no secrets, and removing them would spoil ordinary texts.
MIN_LENGTH = 4
# So much of the beginning of a value is removed too, with what follows of it: a message may have cut the value off.
HEAD_LENGTH = 12
MIN_LINE = 8  # characters of a line that is removed by itself, of a value with several


class Secrets:
    """The values of named environment variables, and the forms in which they may appear in a text.

    What is removed becomes "[NAME]", or "[LABEL]" if there is a label.
    """

    def __init__(self, names: Iterable[str] = (), label: str = "") -> None:
        self.names = tuple(names)
        forms = {
            form: label or name
            for name in self.names
            for form in _list_forms(os.environ.get(name, ""))
            if len(form) >= MIN_LENGTH
        }
        # Longer ones first: a value may contain another one.
        self._forms = sorted(forms.items(), key=lambda pair: -len(pair[0]))

    def remove_from(self, text: str) -> str:
        """Returns the text with "[NAME]" in place of every value."""
        for form, name in self._forms:
            text = text.replace(form, f"[{name}]")
        for form, name in self._forms:
            text = _remove_beginnings(text, form, f"[{name}]")
        return text

    def remove_from_value(self, value: Any) -> Any:
        """Returns a JSON value with the values removed from all its texts, keys of objects included."""
        if not self._forms:
            return value
        if isinstance(value, str):
            return self.remove_from(value)
        if isinstance(value, list):
            return [self.remove_from_value(item) for item in value]
        if isinstance(value, dict):
            return {self.remove_from_value(key): self.remove_from_value(item) for key, item in value.items()}
        return value


_hidden: list[str] = []  # names of the variables whose values this process does not show


def hide_variables(names: Iterable[str]) -> None:
    """Lets `remove_hidden` remove the values of these environment variables in this process, from now on."""
    _hidden.extend(name for name in names if name not in _hidden)


def hide_named_variables(args: Sequence[str]) -> None:
    """Hides the variables that the words of a command line name with `--scoring.env`.

    A user's file runs before all flags are read, and may raise.
    """
    is_name = False
    for word in args:
        flag, _, value = word.partition("=")
        if word.startswith("--"):
            is_name = flag == "--scoring.env"
            word = value
        if is_name and word:
            hide_variables([word])


def remove_hidden(text: str) -> str:
    """Returns the text with "[NAME]" in place of the values of variables that this process hides."""
    return Secrets(_hidden).remove_from(text) if _hidden else text


def _remove_beginnings(text: str, form: str, instead: str) -> str:
    """Returns the text without beginnings of `form` of at least HEAD_LENGTH characters, each as long as it goes."""
    if len(form) <= HEAD_LENGTH:
        return text
    start = text.find(form[:HEAD_LENGTH])
    while start >= 0:
        size = HEAD_LENGTH
        while size < len(form) and text[start + size : start + size + 1] == form[size]:
            size += 1
        text = text[:start] + instead + text[start + size :]
        start = text.find(form[:HEAD_LENGTH], start + len(instead))
    return text


def _list_forms(value: str) -> set[str]:
    """Returns a value as it is, in one line, and as JSON, Python, URLs, HTML, base64, base32 and hex digits write it.

    Long lines of a value with several are among its forms, because messages are often cut at line breaks.
    """
    plain = {value, value.strip(), " ".join(value.split())}
    plain |= {line.strip() for line in value.splitlines() if len(line.strip()) >= MIN_LINE}
    forms = set(plain)
    for text in plain:
        encoded = text.encode("utf-8", "surrogateescape")
        written = {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
        # Some programs write a slash as \/ in JSON.
        forms |= written | {form.replace("/", "\\/") for form in written}
        # Which quotes Python escapes depends on the other quotes of the text that the value is a part of.
        forms |= {ascii(text)[1:-1], repr(text)[1:-1], repr(text + "'\"")[1:-4]}
        forms |= {repr(encoded)[2:-1], repr(encoded + b"'\"")[2:-4]}
        quoted = {quote(encoded), quote(encoded, safe=""), quote_plus(encoded)}
        forms |= quoted | {re.sub("%..", lambda found: found[0].lower(), form) for form in quoted}
        escaped = {html.escape(text), html.escape(text, quote=False)}
        escaped |= {form.replace("&#x27;", "&#39;") for form in escaped}
        forms |= escaped | {form.replace("&quot;", "&#34;") for form in escaped}
        for encode in (base64.b64encode, base64.urlsafe_b64encode, base64.b32encode):
            form = encode(encoded).decode()
            forms |= {form, form.rstrip("=")}
        forms |= {encoded.hex(), encoded.hex().upper()} | _list_base64_cores(encoded)
    return forms


def _list_base64_cores(value: bytes) -> set[str]:
    """Returns what base64 of a longer text has of a value in it, such as that of "user:KEY", at its three alignments.

    The first and last characters, which other bytes change, are left out.
    """
    cores: set[str] = set()
    for offset in range(3) if len(value) >= MIN_LINE else ():
        first, end = math.ceil(offset * 8 / 6), (offset + len(value)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            cores.add(encode(bytes(offset) + value).decode()[first:end])
    return cores
