"""Functions that find and read a final answer that is one number.

An answer is found by its marker: `#### 18`, `\\boxed{18}` or `<answer>18</answer>`, whichever of them was asked for.
The last one counts. Thoughts are not part of the answer (`answers.remove_thoughts`), nor is a special token at the end,
such as `</s>`. A `####` whose line has no digit is a heading.

Where nothing is marked, `find_stated_answer` finds what follows "The answer is", and `read_last_number` the last number
of all. Both are for tasks that ask for it.

An answer is read if it is exactly one number, as people and models write it; its unit is left out. Accepted:
`$1,200.50`, `1 200`, `-3 1/2`, `\\frac{1}{2}`, `18~\\text{miles}`, `20%` (the value is 20), `5 million`, `x = 18`,
`The answer is 18.`, `18 (eighteen)`, `2:00 pm`. Refused as two numbers or an expression: `18 or 20`, `10-20`, `18:30`,
`5+13`, `2^3`, `36/2`. Refused because the value would be a guess: `1,20`, `12,34,567`, `18,5`, `1.2e3`,
`18 and a half`, `5k`, digits other than 0 to 9.

Every scan is a single pass, and an answer of more than `MAX_CHARS` characters is refused, so that time is linear in the
length of the text.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from cohort.tasks.answers import UNFINISHED_THOUGHTS, Span, find_last_box, find_last_tag, remove_thoughts, unwrap_box
from cohort.tasks.expression import MAX_CHARS, Evaluation, read_number

MarkerKind = Literal["hashes", "boxed", "tags"]

_ENDS = re.compile(r"#+|\\boxed|</?answer>")  # whatever ends the answer after ####
_BARE_BOX = re.compile(r"\\boxed\s*(?=[-+$0-9])((?:[^\s{}<]|\{,\})+)")  # a box without braces, as in \boxed18
_SPECIAL = re.compile(r"(?:</s>|<eos>|<end_of_turn>|<\|[A-Za-z0-9_]{1,40}\|>)\s*$")
_VULGAR = {"\u00bd": "1/2", "\u00bc": "1/4", "\u00be": "3/4", "\u2153": "1/3", "\u2154": "2/3"}
_DIGIT = re.compile(f"[0-9{''.join(_VULGAR)}]")
# Only Latin letters: other scripts have letters that change the value, such as pi or a word for ten thousand.
_LETTERS = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f"

# ---- spellings of a number in Unicode, LaTeX and Markdown
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
    # ~ before a unit is a space; elsewhere it may mean "about" or "to", and stays.
    r"(?<=[0-9A-Za-z%])~(?=\s*(?:[A-Za-z]|\\?[$%]))|"
    r"\{,\}|\^\{[23]\}|\^\{?\\circ\}?|\\[!$%,;:() \[\]]|\\(?:left|right|quad|qquad|displaystyle|approx)(?![a-zA-Z])"
)
_LATEX_TO = {"{,}": ",", "\\!": "", "\\$": "$", "\\%": "%", "\\approx": "=", "^{2}": "^2", "^{3}": "^3"}
_EMPHASIS = re.compile(r"(?<![\w)])([*_`]{1,3})(?![\s*_`])([^*_`]*)(?<!\s)\1(?![\w(])")

# ---- text around a number
_UNEQUAL = re.compile("[<>!]=|=[<>]")
_LEAD = re.compile(rf"[{_LETTERS}][{_LETTERS}\s,:'()/$-]*(?::|\b(?:is|are|was|were|equals)\b)")
_EDGE = " \t\r\n$*_`\"'\u201c\u201d"
_WRAPPED = re.compile(r"\(([^()]*)\)|\[([^\[\]]*)\]|\{([^{}]*)\}")

# ---- the number with its sign, currency and unit
_QUANTITY = re.compile(
    r"""([-+]?)\s* (?:(?:[A-Z]{0,3}[$\u20ac\u00a3\u00a5\u20b9]|USD|EUR|GBP|INR|Rs\.?)\s*)? ([-+]?)\s*
    (?: (?:([0-9]+)\s+)? ([0-9]+)\s*/\s*([0-9]+)                      # 1/2 or 3 1/2
      | ([1-9][0-9]{0,2}(?:[ ][0-9]{3})+(?![0-9])(?:\.[0-9]+)?)       # 1 200
      | ([0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+) )                  # 1,200.50
    (.*)""",
    re.VERBOSE | re.DOTALL,
)
_HOUR = re.compile(r"([1-9]|1[0-2]):00(?=\s*[ap]\.?m\Z)", re.IGNORECASE)  # a full hour: 2:00 pm is read as 2 pm
_POWER = re.compile(rf"(?<=[{_LETTERS}])\^?[23\u00b2\u00b3](?![0-9])")  # the power of a unit, as in cm^2 and m3
_UNIT = re.compile(rf"[{_LETTERS}\s.,;:'\"/()%$\u20ac\u00a3\u00a5\u20b9\u00a2\u00b0-]*")
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Words after a number that are no unit: with one of them the text states more than one number.
_NO_UNITS = {"and", "or", "plus", "minus", "squared", "cubed", "pi", "k", "x", "y", "z", "n", "e", *_SCALES}

# "The answer is", "Final answer:" and the like. What follows up to the end of the sentence or line is the statement.
_ANSWER_IS = re.compile(r"\banswer(?:\s+is\s*:?|\s*[:=])[*_]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=[*_`$\"')\]]*(?:\s|$))|\n")
# A number anywhere in a text. A sign counts only if no word, parenthesis or point is before it: "3-4" holds no -4.
_LAST = re.compile(rf"(?:(?<![\w).])[-+{_MINUS}]\$?)?(?:[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)")


@dataclass(frozen=True, slots=True)
class MarkedAnswer:
    """The content of the last marker, or None and the reason why there is none.

    `kinds` are the kinds of marker that occur with a digit in them.
    """

    text: str | None
    kinds: frozenset[MarkerKind]
    reason: str = ""


def find_marked_answer(text: str) -> MarkedAnswer:
    r"""Returns the content of the last marker in a completion: `#### 18`, `\boxed{18}` or `<answer>18</answer>`.

    Thoughts are not searched. `####` with no digit in the text after it is no marker, but an empty box or tag is one.
    Of markers inside each other the inner one counts. If no marker is closed, `text` is None and `reason` says why.

    >>> find_marked_answer("#### 7\nNo: 9 * 2 = 18, so it is\n#### 18").text
    '18'
    >>> find_marked_answer(r"<think>\boxed{7}</think> It is \boxed{18 \text{ miles}}.").text
    '18 \\text{ miles}'
    >>> find_marked_answer("It is 18.").reason
    'no marked number'
    """
    said, is_open = _remove_thoughts_and_special_tokens(text)
    tag, _ = find_last_tag(said)
    candidates: dict[MarkerKind, Span | None] = {
        "hashes": _find_last_hashes(said),
        "boxed": _find_last_box(said),
        "tags": tag,
    }
    spans = {kind: span for kind, span in candidates.items() if span is not None}
    kinds = frozenset(kind for kind, span in spans.items() if _DIGIT.search(said, *span))
    if spans:
        return MarkedAnswer(unwrap_box(said[slice(*max(spans.values()))]), kinds)
    if is_open:
        return MarkedAnswer(None, kinds, UNFINISHED_THOUGHTS)
    is_unclosed = "<answer>" in said or "\\boxed" in said
    return MarkedAnswer(None, kinds, "the marked answer is not closed" if is_unclosed else "no marked number")


def _remove_thoughts_and_special_tokens(text: str) -> tuple[str, bool]:
    """Returns the text outside the thoughts, cut at its end, and whether a thought is not closed.

    Up to four special tokens, such as `</s>`, and the spaces around them are cut off the end.
    """
    said, is_open = remove_thoughts(text)
    # At most four special tokens are removed, and only the last 64 characters are searched: time stays linear.
    for _ in range(4):
        said = said.rstrip()
        if special := _SPECIAL.search(said, max(0, len(said) - 64)):
            said = said[: special.start()]
    return said, is_open


def _find_last_box(text: str) -> Span | None:
    """Returns (start, end) of the content of the last box, closed or bare as in `\\boxed18`; None if there is none.

    A bare box must begin with a digit, a sign or a dollar sign.
    """
    bare = deque(_BARE_BOX.finditer(text), maxlen=1)
    spans = [span for span in (find_last_box(text), bare[0].span(1) if bare else None) if span is not None]
    return max(spans, default=None)


def _find_last_hashes(text: str) -> Span | None:
    """Returns (start, end) of the text after the last `####` that has a digit after it; None if there is none.

    The text is on the line of the hashes or, if that is empty, on the next line with text. Other hashes or a marker end
    it.
    """
    span: Span | None = None
    start: int | None = None
    marks = [(mark.start(), mark.end(), mark[0].startswith("####")) for mark in _ENDS.finditer(text)]
    # The end of the text is treated as one more mark, so that the last answer is ended too.
    for begin, end, is_hashes in [*marks, (len(text), len(text), False)]:
        if start is not None:
            rest = text[start:begin].lstrip()
            line = rest.partition("\n")[0]
            if _DIGIT.search(line):
                span = begin - len(rest), begin - len(rest) + len(line)
        start = end if is_hashes else None
    return span


def find_stated_answer(text: str) -> str | None:
    r"""Returns what a completion says after the last "The answer is" or "Answer:", for completions without a marker.

    It ends with the sentence or the line. None if nothing is said so. Thoughts are not searched.

    >>> find_stated_answer("The answer is 7? No. So the final answer is **$18.50**. Done.")
    '$18.50**'
    >>> find_stated_answer("It is 18.")
    """
    said, _ = _remove_thoughts_and_special_tokens(text)
    last = deque(_ANSWER_IS.finditer(said), maxlen=1)
    if not last:
        return None
    # The statement may stand on the next line.
    start = last[0].end() + len(said[last[0].end() :]) - len(said[last[0].end() :].lstrip())
    end = _SENTENCE_END.search(said, start)
    return said[last[0].end() : end.start() if end else len(said)]


def read_last_number(text: str) -> Evaluation:
    """Returns the value of the last number anywhere in a text, for completions without a marker.

    Thoughts are not searched. Signs of currency and units are ignored; of 1/2 the last number is 2. If there is no
    number, or the last one has misplaced commas or too many digits, `value` is None and `reason` says why.

    >>> read_last_number("5 + 13 makes $18, not 20% more or -$1,200.50.").value
    Fraction(-2401, 2)
    """
    said, is_open = _remove_thoughts_and_special_tokens(text)
    last = deque(_LAST.finditer(said), maxlen=1)
    if not last:
        return Evaluation(reason=UNFINISHED_THOUGHTS if is_open else "no number")
    return read_number(last[0][0].replace("$", ""))


class _RefusedError(Exception):
    """The reason why an answer is refused, on its way out of the reader. It never leaves this module."""


def read_quantity(text: str) -> Evaluation:
    r"""Returns the value of the one number that an answer states, without its unit: 20% is 20, "5 million" is 5000000.

    Only the text after the last "=" and after words such as "the answer is" counts. If it states no number in digits,
    several numbers, or an expression such as 5+13, or if the answer is longer than MAX_CHARS, `value` is None and
    `reason` says why. `numbers` stays empty.

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
        return Evaluation(value=_parse_value(_extract_statement(text)))
    except _RefusedError as refused:
        return Evaluation(reason=str(refused))


def _extract_statement(text: str) -> str:
    """Returns the part of an answer that states the result, in plain spelling and without marks around it.

    It is the text after the last "=", and in it after leading words that end with ":" or "is" (are, was, were, equals).
    """
    stated = _strip_wrapping(_simplify_spelling(text).rpartition("=")[2])
    lead = _LEAD.match(stated)
    return _strip_wrapping(stated[lead.end() :]) if lead else stated


def _simplify_spelling(text: str) -> str:
    """Returns the text with common LaTeX, Markdown and Unicode spellings replaced by plain ones; other LaTeX stays.

    "About equal" becomes "=", and >=, <= and != become one sign without "=".
    """
    text = text.translate(_SPELLING)
    text = _FRACTION.sub(lambda match: f" {match[1] or match[3]}/{match[2] or match[4]} ", text)
    text = _COLOUR.sub(r" \1", _SIZE.sub(" ", text))
    for _ in range(3):  # levels of \text inside \text
        text = _TEXT.sub(r" \1", text)
    text = _LATEX.sub(lambda match: _LATEX_TO.get(match[0], " "), text)
    text = _EMPHASIS.sub(r"\2", text)
    # >=, <= and != become one sign without "=", so that the number after it is not taken for the result.
    return _UNEQUAL.sub("\u2260", text).replace("\u2248", "=")


def _strip_wrapping(text: str) -> str:
    """Returns the text without up to three levels of quotes, dollar signs, Markdown marks and brackets around it.

    Periods at its end and colons at its beginning are dropped too.
    """
    # Three levels of wrapping, as in **(18.)**
    for _ in range(3):
        text = text.lstrip(_EDGE + ":").rstrip(_EDGE + ".")
        if wrapped := _WRAPPED.fullmatch(text):
            text = wrapped[wrapped.lastindex or 0]
    return text


def _parse_value(statement: str) -> Fraction:
    """Returns the value of a text that is one number with its sign, currency and unit.

    Raises _RefusedError for other text.
    """
    if not statement:
        raise _RefusedError("the answer is empty")
    hour = _HOUR.match(statement)
    match = _QUANTITY.fullmatch(hour[1] if hour else statement)
    # A sign may stand before or after the currency, but not in both places.
    if match is None or (match[1] and match[2]):
        raise _RefusedError("not a number")
    *_, whole, above, below, spaced, plain, tail = match.groups()
    scale = _parse_scale(tail)
    if above:
        value = _parse_fraction(whole, above, below)
    else:
        number = read_number((spaced or plain).replace(" ", ""))
        if number.value is None:
            raise _RefusedError(number.reason)
        value = number.value
    return (-scale if "-" in (match[1], match[2]) else scale) * value


def _parse_fraction(whole: str | None, above: str, below: str) -> Fraction:
    """Returns the value of above/below, or of a mixed number such as 3 1/2 if `whole` is not None.

    Raises _RefusedError for a zero denominator, for a division with a whole result, such as 36/2, because there the
    answer is not computed to the end, and for a mixed number whose fraction is above 1.
    """
    numerator, denominator = int(above), int(below)
    if denominator == 0:
        raise _RefusedError("division by zero")
    if numerator % denominator == 0:
        raise _RefusedError("a division left undone")
    if whole is not None and numerator > denominator:
        raise _RefusedError("more than one number")
    return int(whole or "0") + Fraction(numerator, denominator)


def _parse_scale(tail: str) -> int:
    """Returns the factor that `tail`, the text after a number, means: 1 for a unit, 10**6 for "million dollars".

    No text means 1. Raises _RefusedError for words and signs that are no unit, and for a second number.
    """
    tail = _POWER.sub("", tail)
    if _DIGIT.search(tail):
        raise _RefusedError("more than one number")
    if not _UNIT.fullmatch(tail):
        raise _RefusedError("not a number")
    words = re.findall(f"[{_LETTERS}]+", tail.lower())
    scale = _SCALES.get(words[0].removesuffix("s"), 1) if words else 1
    for word in words[scale > 1 :]:
        if word in _NO_UNITS:
            raise _RefusedError(f"a number and {word!r}")
    return scale
