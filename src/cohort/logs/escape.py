"""Escaping of text that models, rows and tools wrote: such text may contain characters that act on a terminal."""

from __future__ import annotations

import shlex
import unicodedata
from collections.abc import Sequence

# Joiners shape emoji and Indic and Persian words, and have no other effect.
_KEEP = {"\n", "\u200c", "\u200d"}


def escape_text(text: str, limit: int = 4000) -> str:
    """Returns the text with every character that could act on a terminal written as an escape sequence.

    Escapes control characters (C0, C1, DEL), formatting ones (bidirectional overrides, zero width except joiners), line
    and paragraph separators, and lone surrogates. Newlines and backslashes stay, tabs become four spaces. Cuts after
    `limit` characters of `text`; a note about how many more there are follows. Does not cut where the note would be as
    long as the rest.

    >>> escape_text("[/INST] \\x1b[2J\\r\\u202eabc")
    '[/INST] \\\\x1b[2J\\\\r\\\\u202eabc'
    """
    note = f"… ({len(text) - limit} more characters)"
    # A note that is longer than what it stands for would hide something and save nothing.
    return escape_all(text) if len(text) <= limit + len(note) else escape_all(text[:limit]) + note


def escape_line(text: str, limit: int = 200) -> str:
    """Returns the text escaped and cut as by `escape_text`, and newlines written as \\n, so that it is one line.

    >>> escape_line("a\\nb")
    'a\\\\nb'
    """
    return escape_text(text, limit).replace("\n", "\\n")


def escape_all(text: str) -> str:
    """Returns the text escaped as by `escape_text`, and not cut. Text that is escaped already is returned unchanged."""
    # Most texts are printable, and finding that out is fast. No printable character is ever escaped.
    return text if text.isprintable() else "".join(map(_escape_character, text))


def _escape_character(c: str) -> str:
    """Returns a character, its escape sequence if it could act on a terminal, or four spaces for a tab."""
    if c == "\t":
        return "    "
    if c in _KEEP or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return c
    return c.encode("unicode_escape").decode("ascii")


def join_command(words: Sequence[str]) -> str:
    """Returns the words of a command as one line for a shell. A word that could act on a terminal is escaped.

    Such a word is written as $'...', which bash, zsh and ksh read.

    >>> join_command(["eval", "a b", "--stop=\\n"])
    "eval 'a b' $'--stop=\\\\n'"
    """
    return " ".join(
        shlex.quote(word) if escape_line(word, len(word)) == word else _quote_escaped(word) for word in words
    )


def _quote_escaped(word: str) -> str:
    """Returns a word as $'...', with escape sequences for its quotes, backslashes and all that could act."""
    plain = word.replace("\\", "\\\\").replace("'", "\\'").replace("\t", "\\t")
    return f"$'{escape_line(plain, len(plain))}'"
