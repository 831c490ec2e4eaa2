"""Text of models, rows and tools is hostile: here it becomes text that can only be read."""

from __future__ import annotations

import unicodedata

# Joiners shape emoji and Indic and Persian words, and can do nothing else.
_KEEP = {"\n", "\u200c", "\u200d"}


def visible(text: str, limit: int = 4000) -> str:
    """The text with every character that could act on a terminal written out; newlines stay, tabs are spaces.

    Escapes control characters (C0, C1, DEL), formatting ones (bidirectional overrides, zero width), line and
    paragraph separators, and lone surrogates. What is longer than `limit` characters is cut.

    >>> visible("[/INST] \\x1b[2J\\r\\u202eabc")
    '[/INST] \\\\x1b[2J\\\\r\\\\u202eabc'
    """
    cut = text[:limit]
    shown = "".join(_character(c) for c in cut)
    return shown if len(text) <= limit else f"{shown}… ({len(text) - limit} more characters)"


def one_line(text: str, limit: int = 200) -> str:
    """`visible`, with newlines written out too.

    >>> one_line("a\\nb")
    'a\\\\nb'
    """
    return visible(text, limit).replace("\n", "\\n")


def _character(c: str) -> str:
    if c == "\t":
        return "    "
    if c in _KEEP or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return c
    return c.encode("unicode_escape").decode("ascii")
