r"""The final answer in a completion of a mathematics task: the last box or answer tag, with the boxes joined to it.

Some write each value of a list into a box of its own: `\boxed{1} and \boxed{2}`. Boxes are joined if only commas,
semicolons, "and", "or", names such as `y =` and signs of LaTeX stand between them. Then all of them are the answer, so
that several guesses are wrong. Words or the end of a sentence between two boxes part them, and the last one counts:
`\boxed{3}. No, it is \boxed{4}`.
"""

from __future__ import annotations

import re

from cohort.tasks.answers import Span, find_boxes, find_last_tag
from cohort.tasks.mathematics.notation import MAX_CHARS, is_number_with_commas

# Longest text between two boxes that can join them, and before a box that can hold its name.
MAX_GAP = 80
# Boxes around the content that are opened: one, and one inside it.
MAX_OPENED = 2

_FILLER = r"(?:[\s$*~&]|\\[()\[\],;:!\\ ]|\\q?quad(?![a-zA-Z]))*"
_CONJUNCTION = (
    r"(?:[,;\uff0c\uff1b]|(?:and|or)(?![a-zA-Z])|\\(?:text|textrm|mbox|mathrm)\s*\{\s*,?\s*(?:and|or)\s*,?\s*\})"
)
_NAME = r"(?:[A-Z]{2}|[A-Za-z]|\\[a-z]+)(?:_\{?\w{1,3}\}?)?(?:\([a-z]\))?\s*="
_GAP = re.compile(rf"{_FILLER}(?:{_CONJUNCTION}{_FILLER})+(?:{_NAME}{_FILLER})?")
# A name stands alone after a word or a sign: in "a + b =", b is no name.
_NAME_BEFORE = re.compile(rf"(?:^|[$,;:.\n({{]|\\[(\[]|[a-z]{{2}}\s)\s*({_NAME})[\s$]*$")


def find_answer(text: str) -> tuple[str | None, bool]:
    r"""Returns the final answer in a text without thoughts, and whether it is in a box; None if nothing is closed.

    It is the content of the last closed box or answer tag, whichever ends last. Of a tag with boxes in it, the boxes
    count. Joined boxes are given as one list, with the names before them.

    >>> find_answer(r"\boxed{1} is wrong: <answer>it is \boxed{\frac{1}{2}}</answer>")
    ('\\frac{1}{2}', True)
    >>> find_answer(r"We get $x = \boxed{1}$ and $y = \boxed{2}$.")
    ('x = 1, y = 2', True)
    >>> find_answer("so it is 4")
    (None, False)
    """
    boxes = find_boxes(text)
    tag, _ = find_last_tag(text)
    if tag is not None and (not boxes or boxes[-1][1] < tag[0]):
        return text[slice(*tag)], False
    return (_read_closing_boxes(text, boxes, MAX_OPENED), True) if boxes else (None, False)


def _read_closing_boxes(text: str, boxes: list[Span], num_opened: int) -> str:
    """Returns the content of the last box or, if others are joined to it, their contents as one list.

    `boxes` are those of the text, at least one. Boxes inside the content are read in the same way, until `num_opened`
    boxes are opened; but not if the last of them is empty.
    """
    first = len(boxes) - 1
    while first > 0 and _are_joined(text, boxes[first - 1], boxes[first]):
        first -= 1
    contents: list[str] = []
    for start, end in boxes[first:]:
        content = text[start:end]
        inner = find_boxes(content) if num_opened > 1 and len(content) <= MAX_CHARS else []
        if inner and inner[-1][0] < inner[-1][1]:
            content = _read_closing_boxes(content, inner, num_opened - 1)
        contents.append(content)
    # A list that is too long is refused anyway, and costs nothing more here.
    if len(contents) == 1 or sum(map(len, contents)) + 2 * len(contents) > MAX_CHARS:
        return ", ".join(contents)
    return ", ".join(_write_item(text, box, content) for box, content in zip(boxes[first:], contents, strict=True))


def _are_joined(text: str, box: Span, next_box: Span) -> bool:
    """Returns whether two boxes, given as places of their contents, belong to one list."""
    begin, end = box[1] + 1, text.rindex("\\boxed", 0, next_box[0])
    return end - begin <= MAX_GAP and _GAP.fullmatch(text, begin, end) is not None


def _write_item(text: str, box: Span, content: str) -> str:
    """Returns the content of one of several boxes as an item of a list: after its name, and 1,234 as one number."""
    opening = text.rindex("\\boxed", 0, box[0])
    name = _NAME_BEFORE.search(text, max(0, opening - MAX_GAP), opening)
    if is_number_with_commas(content):
        content = content.replace(",", "{,}")
    return f"{name[1]} {content}" if name else content
