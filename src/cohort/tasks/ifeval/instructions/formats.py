"""Checks of the form of an answer: lists, highlights, sections, titles, JSON, placeholders, a postscript.

Every scan takes linear time. Where a pattern could scan the same text again and again (a bracket that never closes, a
megabyte of empty lines), the text is split into lines first.
"""

from __future__ import annotations

import json
import re

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_HIGHLIGHT = re.compile(r"\*([^\n*]*)\*")
_DOUBLE_HIGHLIGHT = re.compile(r"\*\*([^\n*]*)\*\*")
_FENCES = ("```json", "```Json", "```JSON", "```")
_POSTSCRIPT_PATTERNS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}


def has_placeholders(text: str, *, num_placeholders: int) -> bool:
    """Returns whether there are at least `num_placeholders` pairs of square brackets, each pair within a line.

    The text between the brackets does not matter and may be missing.
    """
    return sum(map(_count_bracket_pairs, text.split("\n"))) >= num_placeholders


def _count_bracket_pairs(line: str) -> int:
    """Returns how many times "[" is followed by "]" in a line; an opening bracket inside a pair is ignored."""
    count = end = 0
    while (begin := line.find("[", end)) >= 0 and (close := line.find("]", begin)) >= 0:
        count, end = count + 1, close + 1
    return count


def has_bullet_count(text: str, *, num_bullets: int) -> bool:
    """Returns whether exactly `num_bullets` lines begin with one asterisk or with a hyphen, perhaps after spaces.

    No space is needed after the mark: "--" begins with a hyphen too, but "**" is no bullet. An asterisk alone in its
    line takes the next line as its text, so that an asterisk there does not count, as in the reference checker; alone
    in the last line it does not count itself.
    """
    num_stars = num_hyphens = 0
    # whether the line before is a lone asterisk, so that this line is its text and no bullet of its own
    is_taken = False
    lines = text.split("\n")
    for number, line in enumerate(lines):
        begin = line.lstrip()[:2]
        num_hyphens += begin.startswith("-")
        is_alone = line.lstrip() == "*" and number + 1 < len(lines)
        is_star = not is_taken and (is_alone or (len(begin) == 2 and begin[0] == "*" and begin[1] != "*"))
        num_stars += is_star
        is_taken = is_star and is_alone
    return num_stars + num_hyphens == num_bullets


def has_highlights(text: str, *, num_highlights: int) -> bool:
    """Returns whether at least `num_highlights` passages stand between asterisks, as in *this*, each within a line.

    Passages in double asterisks, as in **this**, count too; blank ones do not.
    """
    highlights = [*_HIGHLIGHT.finditer(text), *_DOUBLE_HIGHLIGHT.finditer(text)]
    return sum(1 for highlight in highlights if highlight[1].strip()) >= num_highlights


def has_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """Returns whether there are at least `num_sections` headings: `section_spliter` and a number, as in "Section 1".

    They may stand anywhere in the text. Upper and lower case differ. At most one space is allowed before the number.
    """
    marks = re.finditer(re.escape(section_spliter.strip()) + r"\s?\d+", text)
    return sum(1 for _ in marks) >= num_sections


def has_title(text: str) -> bool:
    """Returns whether some line has a title in double angle brackets, as in <<title>>; a blank one does not count."""
    return any(map(_has_title_in_line, text.split("\n")))


def _has_title_in_line(line: str) -> bool:
    """Returns whether something other than brackets and spaces stands between the first "<<" and the last ">>"."""
    begin, end = line.find("<<"), line.rfind(">>")
    # `begin` is -1 without "<<"; the second comparison refuses that
    return end > begin + 2 > 1 and line[begin : end + 2].lstrip("<").rstrip(">").strip() != ""


def is_json(text: str) -> bool:
    """Returns whether the whole answer is JSON, perhaps inside a Markdown fence.

    Any JSON value is accepted, also a bare number.

    >>> is_json('```json\\n{"a": 1}\\n```'), is_json('Here you are: {"a": 1}')
    (True, False)
    """
    text = text.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def has_option(text: str) -> bool:
    """Returns whether "My answer is yes.", "My answer is no." or "My answer is maybe." occurs, word for word."""
    return any(option in text for option in OPTIONS)


def has_postscript(text: str, *, postscript_marker: str) -> bool:
    """Returns whether the text contains `postscript_marker`, such as "P.S.", anywhere and in upper or lower case.

    In "P.S." and "P.P.S" one space may stand before each letter after the first.
    """
    marker = postscript_marker.strip()
    return re.search(_POSTSCRIPT_PATTERNS.get(marker) or re.escape(marker.lower()), text.lower()) is not None
