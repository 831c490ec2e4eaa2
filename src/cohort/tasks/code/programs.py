"""The program in an answer: where it begins and ends."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cohort.tasks.answers import UNFINISHED_THOUGHTS, has_visible_text, remove_thoughts

MAX_CHARS = 100_000  # of a program; a longer one is wrong
_FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([\w+.#-]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("python", "py", "python3")


@dataclass(frozen=True, slots=True)
class FoundProgram:
    """The program of an answer; or "" and the reason why there is none."""

    source: str
    reason: str = ""


def find_program(text: str) -> FoundProgram:
    r"""Returns the program in an answer: the last closed block of Python or, without one, the last of no language.

    A block begins and ends with a line of three backquotes. Without any, the whole text is the program. Thoughts are
    not searched. A block that is not closed, because the answer was cut, is no program.

    >>> find_program("So:\n```python\nprint(1)\n```\nThis prints 1.").source
    'print(1)\n'
    >>> find_program("```python\nprint(1)").reason
    'its block of code does not end'
    """
    said, is_open = remove_thoughts(text)
    if is_open:
        return FoundProgram("", UNFINISHED_THOUGHTS)
    blocks, is_closed = _find_blocks(said)
    if blocks:
        of_python = [source for language, source in blocks if language in _PYTHON]
        plain = [source for language, source in blocks if not language]
        if not of_python and not plain:
            return FoundProgram("", f"its blocks of code are in {blocks[-1][0][:20]}, not in python")
        source = (of_python or plain)[-1]
    elif not is_closed:
        return FoundProgram("", "its block of code does not end")
    else:
        source = said
    if not has_visible_text(source):
        return FoundProgram("", "it has no program")
    if len(source) > MAX_CHARS:
        return FoundProgram("", f"the program is longer than {MAX_CHARS} characters")
    return FoundProgram(source)


def _find_blocks(text: str) -> tuple[list[tuple[str, str]], bool]:
    """Returns (language, source) of every closed block, in order, and whether the last block that begins also ends."""
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for mark in _FENCE.finditer(text):
        if opened is None:
            opened = mark
        elif not mark[2] and mark[1].startswith(opened[1]):
            blocks.append((opened[2].lower(), text[opened.end() + 1 : mark.start()]))
            opened = None
    return blocks, opened is None
