"""The fast reader of YAML texts: it reads those that `dump_yaml` writes, 50 times as fast as PyYAML.

It knows sections, lists of plain values, and values on one line. For any other text it gives up, and the caller asks
`read_yaml`. Where it gives an answer, that of `read_yaml` is the same.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from cohort.config.yaml_text import MAX_SIZE

# Words that YAML reads as truth values or as nothing, in any of their spellings.
_SPECIAL = frozenset(
    spelling
    for word in ("true", "false", "yes", "no", "on", "off", "null")
    for spelling in (word, word.capitalize(), word.upper())
)
_WORDS = {"true": True, "false": False, "null": None, "''": "", ".inf": float("inf"), "-.inf": float("-inf")}
_LINE = re.compile(r"( *)(?:([A-Za-z_][A-Za-z0-9_]{0,200}):(?: (.+))?|- (.+))")
_WHOLE = re.compile(r"-?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]*)\.[0-9]+(?:e[-+][0-9]+)?")
# What begins with a letter, a slash or a dollar sign is a text, unless it is one of the special words; so are signs. A
# colon before a space would make a key of it.
_TEXT = re.compile(r"[A-Za-z_/$](?:(?:[\w ./@+*=()${},?!;<>%-]|:(?! ))*[\w./@+*=()${},?!;<>%-])?|\+[-+*/]*", re.ASCII)
_QUOTED = re.compile(r"'[\w ./@+*=():;,<>!?\[\]{}#&%|\"-]+'", re.ASCII)
_MAX_DIGITS = 300  # of a whole number; Python refuses to read far longer ones
_MAX_SECTIONS = 20  # inside each other


class _GiveUpError(Exception):
    """The text has something that this reader does not know."""


def read_regular_yaml(text: str) -> dict[str, Any] | None:
    """Returns the value of a YAML text of sections, lists and plain values; None if it has anything else."""
    if len(text) > MAX_SIZE or not text.endswith("\n"):
        return None
    tree: dict[str, Any] = {}
    # Sections that are open, as (spaces before their keys, section). The last one gets the next key.
    open_sections: list[tuple[int, dict[str, Any]]] = [(0, tree)]
    try:
        items: list[Any] | None = None  # the list that is open
        pending = ""  # the key that waits for its section or list, in the last section; "" = none
        for line in text[:-1].split("\n"):
            indent, key, value, is_item = _read_line(line)
            if is_item:
                if pending and indent == open_sections[-1][0]:
                    items = open_sections[-1][1][pending] = []
                    pending = ""
                if items is None or indent != open_sections[-1][0]:
                    raise _GiveUpError
                items.append(value)
                continue
            items = None
            if pending:
                if indent <= open_sections[-1][0] or len(open_sections) > _MAX_SECTIONS:
                    raise _GiveUpError
                inner: dict[str, Any] = {}
                open_sections[-1][1][pending] = inner
                open_sections.append((indent, inner))
            while indent < open_sections[-1][0]:
                open_sections.pop()
            section = open_sections[-1][1]
            if indent != open_sections[-1][0] or key in section:
                raise _GiveUpError
            pending = key if value is _NOTHING else ""
            # The place of a section is kept, so that keys stay in their order.
            section[key] = [] if value is _EMPTY_LIST else {} if value is _EMPTY_SECTION else value
        return None if pending else tree
    except _GiveUpError:
        return None


_NOTHING, _EMPTY_LIST, _EMPTY_SECTION = object(), object(), object()


# The configs of many runs have most of their lines in common.
@lru_cache(maxsize=8192)
def _read_line(line: str) -> tuple[int, str, Any, bool]:
    """Returns (spaces before, key, value, whether it is an item of a list) of a line. The key of an item is "".

    The value is _NOTHING for a key alone. Raises _GiveUpError for a line of another form.
    """
    match = _LINE.fullmatch(line)
    if match is None:
        raise _GiveUpError
    spaces, key, value, item = match.groups()
    if key is None:
        return len(spaces), "", _read_scalar(item), True
    if key in _SPECIAL:
        raise _GiveUpError
    if value in ("[]", "{}"):
        return len(spaces), key, _EMPTY_LIST if value == "[]" else _EMPTY_SECTION, False
    return len(spaces), key, _NOTHING if value is None else _read_scalar(value), False


def _read_scalar(text: str) -> Any:
    """Returns the value of a text that stands for one number, word or text. Raises _GiveUpError if it may not."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) <= _MAX_DIGITS:
        if _WHOLE.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
    if _TEXT.fullmatch(text) and text not in _SPECIAL:
        return text
    if _QUOTED.fullmatch(text):
        return text[1:-1]
    raise _GiveUpError
