"""Escaping of text that models, rows and tools wrote: such text may contain characters that act on a terminal."""

from __future__ import annotations

import unicodedata

# Joiners shape emoji and Indic and Persian words, and have no other effect.
_KEEP = {"\n", "\u200c", "\u200d"}


def escape_text(text: str, limit: int = 4000) -> str:
    """Returns the text with every character that could act on a terminal written as an escape sequence.

    Escapes control characters (C0, C1, DEL), formatting ones (bidirectional overrides, zero width except joiners), line
    and paragraph separators, and lone surrogates. Newlines and backslashes stay, tabs become four spaces. Cuts after
    `limit` characters of `text`; a note about how many more there are follows.

    >>> escape_text("[/INST] \\x1b[2J\\r\\u202eabc")
    '[/INST] \\\\x1b[2J\\\\r\\\\u202eabc'
    """
    cut = text[:limit]
    shown = "".join(_escape_character(c) for c in cut)
    return shown if len(text) <= limit else f"{shown}… ({len(text) - limit} more characters)"


def escape_line(text: str, limit: int = 200) -> str:
    """Returns the text escaped and cut as by `escape_text`, and newlines written as \\n, so that it is one line.

    >>> escape_line("a\\nb")
    'a\\\\nb'
    """
    return escape_text(text, limit).replace("\n", "\\n")


def _escape_character(c: str) -> str:
    """Returns a character, its escape sequence if it could act on a terminal, or four spaces for a tab."""
    if c == "\t":
        return "    "
    if c in _KEEP or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return c
    return c.encode("unicode_escape").decode("ascii")
