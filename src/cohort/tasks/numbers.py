"""Finding and reading a final answer that is one number.

Found: by its marker, `#### 18`, `\\boxed{18}` or `<answer>18</answer>`, whichever was asked for; the last one counts.
What a model thinks is not its answer (`answers.after_thoughts`), nor is a special token at its end, such as `</s>`. A
`####` whose line has no digit is a heading.

Read: exactly one number, as people and models write it, with its unit left out. `$1,200.50`, `1 200`, `-3 1/2`,
`\\frac{1}{2}`, `18~\\text{miles}`, `20%` (that is 20), `5 million`, `x = 18`, `The answer is 18.`, `18 (eighteen)`,
`2:00 pm`. Two numbers are no answer, nor is an expression: `18 or 20`, `10-20`, `18:30`, `5+13`, `2^3`, `36/2`. Nor is
what would have to be guessed: `1,20`, `12,34,567`, `18,5`, `1.2e3`, `18 and a half`, `5k`, digits other than 0 to 9.

Every scan is a single pass, and of an answer at most `MAX_CHARS` characters are read: time is linear in the text.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from cohort.tasks.answers import OPEN, Span, after_thoughts, inner_box, last_box, last_tag
from cohort.tasks.expression import MAX_CHARS, Evaluation, read_number

Kind = Literal["hashes", "boxed", "tags"]

_ENDS = re.compile(r"#+|\\boxed|</?answer>")  # of what stands after hashes
_BARE_BOX = re.compile(r"\\boxed\s*(?=[-+$0-9])((?:[^\s{}<]|\{,\})+)")  # braces forgotten
_SPECIAL = re.compile(r"(?:</s>|<eos>|<end_of_turn>|<\|[A-Za-z0-9_]{1,40}\|>)\s*$")
_VULGAR = {"\u00bd": "1/2", "\u00bc": "1/4", "\u00be": "3/4", "\u2153": "1/3", "\u2154": "2/3"}
_DIGIT = re.compile(f"[0-9{''.join(_VULGAR)}]")
_LETTERS = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f"  # Latin alone: others hold pi, or words for ten thousand

# ---- how it is spelt
_SPACES = "\u00a0\u2007\u2009\u202f"  # no-break, figure, thin, narrow no-break
_MINUS = "\u2212\u2013\u2010\u2011"  # minus sign, en dash, hyphen, no-break hyphen
_SPELLING = str.maketrans(
    dict.fromkeys(_SPACES, " ")
    | dict.fromkeys(_MINUS, "-")
    | {"\u2044": "/", "\u2019": "'"}
    | {sign: f" {value} " for sign, value in _VULGAR.items()}
)
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}|([0-9])\s*([0-9]))")
_COLOUR = re.compile(r"\\(?:text)?color\s*\{[A-Za-z]{1,20}\}(?:\s*\{([^{}]*)\})?")
_SIZE = re.compile(r"\\(?:tiny|small|normalsize|[lL]arge|LARGE|[hH]uge|textstyle)(?![a-zA-Z])")
_TEXT = re.compile(r"\\(?:text|math|mbox|bold|operatorname)[a-z]*\s*\{([^{}]*)\}")
_LATEX = re.compile(
    r"(?<=[0-9A-Za-z%])~(?=\s*(?:[A-Za-z]|\\?[$%]))|"  # a space before a unit; elsewhere it may be "about" or "to"
    r"\{,\}|\^\{[23]\}|\^\{?\\circ\}?|\\[!$%,;:() \[\]]|\\(?:left|right|quad|qquad|displaystyle|approx)(?![a-zA-Z])"
)
_LATEX_TO = {"{,}": ",", "\\!": "", "\\$": "$", "\\%": "%", "\\approx": "=", "^{2}": "^2", "^{3}": "^3"}
_EMPHASIS = re.compile(r"(?<![\w)])([*_`]{1,3})(?![\s*_`])([^*_`]*)(?<!\s)\1(?![\w(])")

# ---- what stands around it
_UNEQUAL = re.compile("[<>!]=|=[<>]")
_LEAD = re.compile(rf"[{_LETTERS}][{_LETTERS}\s,:'()/$-]*(?::|\b(?:is|are|was|were|equals)\b)")
_EDGE = " \t\r\n$*_`\"'\u201c\u201d"
_WRAPPED = re.compile(r"\(([^()]*)\)|\[([^\[\]]*)\]|\{([^{}]*)\}")

# ---- the number and its unit
_QUANTITY = re.compile(
    r"""([-+]?)\s* (?:(?:[A-Z]{0,3}[$\u20ac\u00a3\u00a5\u20b9]|USD|EUR|GBP|INR|Rs\.?)\s*)? ([-+]?)\s*
    (?: (?:([0-9]+)\s+)? ([0-9]+)\s*/\s*([0-9]+)                      # 1/2 or 3 1/2
      | ([1-9][0-9]{0,2}(?:[ ][0-9]{3})+(?![0-9])(?:\.[0-9]+)?)       # 1 200
      | ([0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+) )                  # 1,200.50
    (.*)""",
    re.VERBOSE | re.DOTALL,
)
_HOUR = re.compile(r"([1-9]|1[0-2]):00(?=\s*[ap]\.?m\Z)", re.IGNORECASE)  # of the clock: 2:00 pm is 2 pm
_POWER = re.compile(rf"(?<=[{_LETTERS}])\^?[23\u00b2\u00b3](?![0-9])")  # of a unit, as in cm^2 and m3
_UNIT = re.compile(rf"[{_LETTERS}\s.,;:'\"/()%$\u20ac\u00a3\u00a5\u20b9\u00a2\u00b0-]*")
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NO_UNITS = {"and", "or", "plus", "minus", "squared", "cubed", "pi", "k", "x", "y", "z", "n", "e", *_SCALES}

_LAST = re.compile(rf"(?:(?<![\w).])[-+{_MINUS}]\$?)?(?:[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)")


@dataclass(frozen=True, slots=True)
class Marked:
    """What stands in the last marker, or None with the reason; and the kinds of marker that hold a number."""

    text: str | None
    kinds: frozenset[Kind]
    reason: str = ""


def find_marked(text: str) -> Marked:
    r"""The answer that a model marked as its last.

    >>> find_marked("#### 7\nNo: 9 * 2 = 18, so it is\n#### 18").text
    '18'
    >>> find_marked(r"<think>\boxed{7}</think> It is \boxed{18 \text{ miles}}.").text
    '18 \\text{ miles}'
    >>> find_marked("It is 18.").reason
    'no marked number'
    """
    said, is_open = _said(text)
    tag, _ = last_tag(said)
    candidates: dict[Kind, Span | None] = {"hashes": _last_hashes(said), "boxed": _last_box(said), "tags": tag}
    spans = {kind: span for kind, span in candidates.items() if span is not None}
    kinds = frozenset(kind for kind, span in spans.items() if _DIGIT.search(said, *span))
    if spans:
        return Marked(inner_box(said[slice(*max(spans.values()))]), kinds)
    if is_open:
        return Marked(None, kinds, OPEN)
    half = "<answer>" in said or "\\boxed" in said
    return Marked(None, kinds, "the marked answer is not closed" if half else "no marked number")


def _said(text: str) -> tuple[str, bool]:
    """What is not thought, without special tokens at its end, and whether the thoughts go on to the end."""
    said, is_open = after_thoughts(text)
    for _ in range(4):
        said = said.rstrip()
        if special := _SPECIAL.search(said, max(0, len(said) - 64)):
            said = said[: special.start()]
    return said, is_open


def _last_box(text: str) -> Span | None:
    """The last closed box, or what stands after a later \\boxed without braces."""
    bare = deque(_BARE_BOX.finditer(text), maxlen=1)
    spans = [span for span in (last_box(text), bare[0].span(1) if bare else None) if span is not None]
    return max(spans, default=None)


def _last_hashes(text: str) -> Span | None:
    """What stands after the last ####, on its line or the next: it has a digit, and other hashes or a marker end it."""
    found: Span | None = None
    start: int | None = None
    marks = [(mark.start(), mark.end(), mark[0].startswith("####")) for mark in _ENDS.finditer(text)]
    for begin, end, is_hashes in [*marks, (len(text), len(text), False)]:
        if start is not None:
            rest = text[start:begin].lstrip()
            line = rest.partition("\n")[0]
            if _DIGIT.search(line):
                found = begin - len(rest), begin - len(rest) + len(line)
        start = end if is_hashes else None
    return found


def last_number(text: str) -> Evaluation:
    """The last number of a text without a marker.

    >>> last_number("5 + 13 makes $18, not 20% more or -$1,200.50.").value
    Fraction(-2401, 2)
    """
    said, is_open = _said(text)
    last = deque(_LAST.finditer(said), maxlen=1)
    if not last:
        return Evaluation(reason=OPEN if is_open else "no number")
    return read_number(last[0][0].replace("$", ""))


class _Refused(Exception):
    """Carries the reason out of the reader; never leaves this module."""


def read_quantity(text: str) -> Evaluation:
    r"""The one number that an answer states; its unit is left out.

    >>> read_quantity(r"\$1{,}200.50 \text{ per year}").value
    Fraction(2401, 2)
    >>> read_quantity("5 + 13 = **18** apples.").value
    Fraction(18, 1)
    >>> read_quantity("18 or 20").reason
    'more than one number'
    """
    if len(text) > MAX_CHARS:
        return Evaluation(reason=f"the answer is longer than {MAX_CHARS} characters")
    try:
        return Evaluation(value=_value(_stated(text)))
    except _Refused as refused:
        return Evaluation(reason=str(refused))


def _stated(text: str) -> str:
    """What an answer says it comes to: after the last "=", and after words like "the answer is"."""
    stated = _bare(_plain(text).rpartition("=")[2])
    lead = _LEAD.match(stated)
    return _bare(stated[lead.end() :]) if lead else stated


def _plain(text: str) -> str:
    """LaTeX, Markdown and Unicode spellings as plain ones."""
    text = text.translate(_SPELLING)
    text = _FRACTION.sub(lambda found: f" {found[1] or found[3]}/{found[2] or found[4]} ", text)
    text = _COLOUR.sub(r" \1", _SIZE.sub(" ", text))
    for _ in range(3):  # \text in \text
        text = _TEXT.sub(r" \1", text)
    text = _LATEX.sub(lambda found: _LATEX_TO.get(found[0], " "), text)
    text = _EMPHASIS.sub(r"\2", text)
    return _UNEQUAL.sub("\u2260", text).replace("\u2248", "=")  # what is unequal has no side to take


def _bare(text: str) -> str:
    """Without what wraps an answer, and without a final period."""
    for _ in range(3):
        text = text.lstrip(_EDGE + ":").rstrip(_EDGE + ".")
        if wrapped := _WRAPPED.fullmatch(text):
            text = wrapped[wrapped.lastindex or 0]
    return text


def _value(stated: str) -> Fraction:
    if not stated:
        raise _Refused("the answer is empty")
    hour = _HOUR.match(stated)
    found = _QUANTITY.fullmatch(hour[1] if hour else stated)
    if found is None or (found[1] and found[2]):
        raise _Refused("not a number")
    *_, whole, above, below, spaced, plain, tail = found.groups()
    scale = _scale(tail)
    if above:
        value = _fraction(whole, above, below)
    else:
        number = read_number((spaced or plain).replace(" ", ""))
        if number.value is None:
            raise _Refused(number.reason)
        value = number.value
    return (-scale if "-" in (found[1], found[2]) else scale) * value


def _fraction(whole: str | None, above: str, below: str) -> Fraction:
    """A fraction is a number; a division that comes out even is work left undone."""
    numerator, denominator = int(above), int(below)
    if denominator == 0:
        raise _Refused("division by zero")
    if numerator % denominator == 0:
        raise _Refused("a division left undone")
    if whole is not None and numerator > denominator:
        raise _Refused("more than one number")
    return int(whole or "0") + Fraction(numerator, denominator)


def _scale(tail: str) -> int:
    """What the words after a number make of it: 1 for a unit, a million for "million dollars"."""
    tail = _POWER.sub("", tail)
    if _DIGIT.search(tail):
        raise _Refused("more than one number")
    if not _UNIT.fullmatch(tail):
        raise _Refused("not a number")
    words = re.findall(f"[{_LETTERS}]+", tail.lower())
    scale = _SCALES.get(words[0].removesuffix("s"), 1) if words else 1
    for word in words[scale > 1 :]:
        if word in _NO_UNITS:
            raise _Refused(f"a number and {word!r}")
    return scale
