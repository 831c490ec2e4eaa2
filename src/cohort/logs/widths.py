"""How wide a text is on a terminal, and texts of exactly one width."""

from __future__ import annotations

import unicodedata
from functools import lru_cache


def measure_width(text: str) -> int:
    """Returns the number of columns that a text takes on a terminal.

    Wide characters, such as Chinese ones, take two, and those that join the one before them none.

    >>> measure_width("abc"), measure_width("表"), measure_width("e\\u0301")
    (3, 2, 1)
    """
    return len(text) if text.isascii() else sum(map(_measure_character, text))


def cut_text(text: str, width: int, mark: str = "…", *, keep_end: bool = False) -> str:
    """Returns the text if it fits into `width` columns, else a part of it and `mark` in place of the rest.

    It is the beginning or, with `keep_end`, the beginning and the end, each about half.

    >>> cut_text("abcdef", 4), cut_text("abc", 4), cut_text("abcdefgh", 6, keep_end=True)
    ('abc…', 'abc', 'abc…gh')
    """
    if measure_width(text) <= width:
        return text
    room = width - measure_width(mark)
    if room < 0:
        return ""
    end = take_columns(text[::-1], room // 2)[::-1] if keep_end else ""
    return take_columns(text, room - measure_width(end)) + mark + end


def take_columns(text: str, width: int) -> str:
    """Returns as much of the beginning of a text as fits into `width` columns."""
    for i, character in enumerate(text):
        width -= _measure_character(character)
        if width < 0:
            return text[:i]
    return text


def pad_text(text: str, width: int) -> str:
    """Returns the text with spaces after it, so that it takes `width` columns; unchanged if it takes more."""
    return text + " " * (width - measure_width(text))


@lru_cache(maxsize=4096)
def _measure_character(character: str) -> int:
    """Returns the columns that one character takes: 0, 1 or 2."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
