"""Text of models as rows of a column: escaped, wrapped at words, and never wider than the column on any terminal."""

from __future__ import annotations

import re
import unicodedata

from cohort.logs.escape import escape_all
from cohort.logs.widths import measure_width, take_columns

MAX_MARKS = 8  # characters without a width of their own that may follow each other, such as accents
# Joiners and variation selectors change the width of their neighbours on some terminals and not on others.
_TAG = re.compile(r"<[A-Za-z/]")  # how a tag begins
_WIDTH_CHANGERS = {0x200C, 0x200D, *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0), *range(0x1F3FB, 0x1F400)}


class Column:
    """The text of one answer while it grows. `rows` are finished; `last` may still change."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[str] = []
        self.has_ended = False
        self._last = ""  # of the present paragraph: what is not in `rows` yet
        self._num_marks = 0  # characters without a width at the end of the text

    @property
    def all_rows(self) -> list[str]:
        """The finished rows and, while the answer grows, the present one if it has text."""
        return [*self.rows, self._last] if self._last and not self.has_ended else self.rows

    def add(self, text: str) -> None:
        """Adds text of a model, which may be hostile."""
        paragraphs = (self._last + self._clean(text)).split("\n")
        for paragraph in paragraphs[:-1]:
            self.rows += wrap_paragraph(paragraph, self.width)
        *done, self._last = wrap_paragraph(paragraphs[-1], self.width)
        self.rows += done

    def end(self, note: str = "") -> None:
        """Ends the answer. `note` is put below it, in rows of its own; "" = none."""
        if self._last.strip():
            self.rows.append(self._last)
        self._last = ""
        # Empty rows at the end would only push the next question down.
        while self.rows and not self.rows[-1].strip():
            self.rows.pop()
        if note:
            self.rows += wrap_paragraph(self._clean(note).replace("\n", " "), self.width)
        self.has_ended = True

    def _clean(self, text: str) -> str:
        """Returns the text escaped, without characters that terminals draw in different widths.

        Of more than MAX_MARKS characters without width in a row, the others become one "…".
        """
        cleaned: list[str] = []
        for character in escape_all(text):
            if character.isascii():
                self._num_marks = 0
                cleaned.append(character)
                continue
            if ord(character) in _WIDTH_CHANGERS:
                continue
            # The width of a character that Python does not know yet is not known either.
            if unicodedata.category(character) == "Cn":
                character = character.encode("unicode_escape").decode("ascii")
            self._num_marks = 0 if measure_width(character) else self._num_marks + 1
            if self._num_marks <= MAX_MARKS:
                cleaned.append(character)
            elif self._num_marks == MAX_MARKS + 1:
                cleaned.append("…")
        return "".join(cleaned)


def _find_last_tag(text: str, end: int) -> int:
    """Returns where the last tag begins before `end`; -1 = nowhere. Only text up to the character at `end` counts."""
    return max((match.start() for match in _TAG.finditer(text, 0, end + 1)), default=-1)


def wrap_paragraph(text: str, width: int) -> list[str]:
    """Returns a text without line breaks as rows of at most `width` cells, at least one row.

    It is broken at spaces and before tags such as </answer>. A word that is wider than a row is cut. The spaces at a
    break are left out. Rows before the last one do not change if more text is added at the end.

    >>> wrap_paragraph("<answer>42</answer>", 13)
    ['<answer>42', '</answer>']
    >>> wrap_paragraph("one two  three", 8), wrap_paragraph("", 8), wrap_paragraph("abcdefghij", 4)
    (['one two', 'three'], [''], ['abcd', 'efgh', 'ij'])
    """
    rows: list[str] = []
    while measure_width(text) > width:
        head = take_columns(text, width)
        rest = text[len(head) :]
        # The row may end at a space, inside it or directly after it.
        cut = len(head) if rest.startswith(" ") else max(head.rfind(" "), _find_last_tag(text, len(head)))
        if cut <= 0 or not head[:cut].strip():
            cut = len(head)
        rows.append(text[:cut].rstrip(" "))
        text = text[cut:].lstrip(" ")
    return [*rows, text]
