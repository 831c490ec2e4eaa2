"""What can be seen in an answer's form: lists, highlights, sections, titles, JSON, placeholders, a postscript.

Every scan is linear: the patterns that would run over the same text again and again (a bracket that never closes,
a megabyte of empty lines) are split into lines first.
"""

from __future__ import annotations

import json
import re

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_HIGHLIGHT = re.compile(r"\*([^\n*]*)\*")
_DOUBLE_HIGHLIGHT = re.compile(r"\*\*([^\n*]*)\*\*")
_FENCES = ("```json", "```Json", "```JSON", "```")
_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    """At least so many pairs of square brackets, each within a line; what is inside does not matter."""
    return sum(map(_brackets, text.split("\n"))) >= num_placeholders


def _brackets(line: str) -> int:
    count, end = 0, 0
    while (begin := line.find("[", end)) >= 0 and (close := line.find("]", begin)) >= 0:
        count, end = count + 1, close + 1
    return count


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    """Exactly so many lines that begin with one asterisk or with a hyphen.

    An asterisk alone in its line takes the next line for its text, as in the reference.
    """
    stars = hyphens = 0
    taken = False
    lines = text.split("\n")
    for number, line in enumerate(lines):
        begin = line.lstrip()[:2]
        hyphens += begin.startswith("-")
        is_alone = line.lstrip() == "*" and number + 1 < len(lines)
        is_star = not taken and (is_alone or (len(begin) == 2 and begin[0] == "*" and begin[1] != "*"))
        stars += is_star
        taken = is_star and is_alone
    return stars + hyphens == num_bullets


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    """At least so many *highlights* within a line; a **double** one counts too."""
    found = [*_HIGHLIGHT.finditer(text), *_DOUBLE_HIGHLIGHT.finditer(text)]
    return sum(1 for highlight in found if highlight[1].strip()) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many marks such as "Section 1", in the case that was asked for."""
    marks = re.finditer(re.escape(section_spliter.strip()) + r"\s?\d+", text)
    return sum(1 for _ in marks) >= num_sections


def title(text: str) -> bool:
    """A title in double angle brackets, within a line."""
    return any(map(_has_title, text.split("\n")))


def _has_title(line: str) -> bool:
    begin, end = line.find("<<"), line.rfind(">>")
    return end > begin + 2 > 1 and line[begin : end + 2].lstrip("<").rstrip(">").strip() != ""


def json_format(text: str) -> bool:
    """The whole answer is JSON, perhaps in a fence.

    >>> json_format('```json\\n{"a": 1}\\n```'), json_format('Here you are: {"a": 1}')
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


def constrained_response(text: str) -> bool:
    """One of the three options occurs, word for word."""
    return any(option in text for option in OPTIONS)


def postscript(text: str, *, postscript_marker: str) -> bool:
    """A postscript begins somewhere, not only at the end; "P. S." is one too."""
    marker = postscript_marker.strip()
    return re.search(_POSTSCRIPTS.get(marker) or re.escape(marker.lower()), text.lower()) is not None
