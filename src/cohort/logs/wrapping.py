"""Prose for a terminal: lines that do not fit are broken between words. Tables, JSON, code and paths stay whole."""

from __future__ import annotations

import re

from cohort.logs.widths import measure_width

_SOURCE_WIDTH = 120  # columns of a line in a help text, up to which its words were filled by hand
_MIN_ROOM = 24  # columns that a text needs beside what stands left of it
_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
_COMMAND = re.compile(r"\s*(?:next\s+)?(?:\S*/)?(?:cohort|python[0-9.]*) ")
_DATA = ("{", "[", '"', "}", "]")  # how lines of JSON begin


def wrap_text(text: str, width: int) -> str:
    """Returns the text with lines of at most `width` columns, where it is prose.

    A line whose last part stands in a column of its own, as in a list of flags with explanations, continues below that
    part. A word is never broken. Lines of JSON, commands, and rows of tables whose last cell begins too far right to be
    continued stay as they are.

    >>> print(wrap_text("  --out DIR  The folder in which the run is made (default: runs).", 40))
      --out DIR  The folder in which the run
                 is made (default: runs).
    """
    if text.lstrip().startswith(_DATA[:2]) or all(measure_width(line) <= width for line in text.split("\n")):
        return text
    return "\n".join(row for line in _join_filled_lines(text.split("\n")) for row in _wrap_line(line, width))


def wrap_words(text: str, width: int) -> list[str]:
    """Returns a text without line breaks as rows of at most `width` columns, at least one row, broken at spaces.

    A word that is wider has a row of its own.

    >>> wrap_words("one two  three", 8), wrap_words("", 8), wrap_words("a abcdefghij", 4)
    (['one two', 'three'], [''], ['a', 'abcdefghij'])
    """
    rows = [""]
    for word in text.split(" "):
        longer = f"{rows[-1]} {word}" if rows[-1] else word
        if measure_width(longer) <= width or not rows[-1]:
            rows[-1] = longer
        elif word:
            rows.append(word)
    return [row.rstrip(" ") for row in rows]


def _wrap_line(line: str, width: int) -> list[str]:
    """Returns a line as rows that fit, if it is prose."""
    if measure_width(line) <= width or line.lstrip().startswith(_DATA) or _is_command(line):
        return [line]
    place = _find_text(line)
    column = measure_width(line[:place])
    if width - column < _MIN_ROOM and len(_GAP.findall(line)) == 1:
        # No table has one gap and such a long first cell: it is prose with two spaces in it.
        place = column = len(line) - len(line.lstrip(" "))
    if width - column < _MIN_ROOM:
        return [line]
    first, *others = wrap_words(line[place:], width - column)
    return [line[:place] + first, *(" " * column + row for row in others)]


def _is_command(line: str) -> bool:
    """Returns whether a line is a command to copy, and not a sentence that begins with one."""
    return _COMMAND.match(line) is not None and not line.endswith((".", ":"))


def _find_text(line: str) -> int:
    """Returns the index at which the last part of a line begins: behind the last gap, or behind its indentation."""
    gaps = list(_GAP.finditer(line))
    return gaps[-1].end() if gaps else len(line) - len(line.lstrip(" "))


def _join_filled_lines(lines: list[str]) -> list[str]:
    """Returns the lines of a help text, those of one paragraph joined to one.

    A line continues the one before it if it begins in the same column, and its first word had no room there.
    """
    joined: list[str] = []
    length = 0  # of the last line as it was written
    for line in lines:
        words = line.split()
        is_filled = length <= _SOURCE_WIDTH < length + 1 + len(words[0]) if words else False
        is_prose = words[:1] and not words[0].startswith("-") and not _GAP.search(line)
        if joined and is_filled and is_prose and _find_text(joined[-1]) == len(line) - len(line.lstrip(" ")):
            joined[-1] = f"{joined[-1]} {line.strip()}"
        else:
            joined.append(line)
        length = len(line)
    return joined
