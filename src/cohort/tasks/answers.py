"""Finding the answer in what a model wrote.

What it thinks is not its answer (`after_thoughts`). In the rest, the last closed `<answer>...</answer>` counts;
without one, the last closed `\\boxed{...}`. Around and inside it, LaTeX, dollar signs, bold marks and a final period
are handled on purpose; the rest is left for the reader of the answer to refuse. All scans are single passes: time is
linear in the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cohort.tasks.expression import MAX_CHARS, Evaluation, evaluate, read_number

_TAG = re.compile(r"</?answer>")
_BOX = re.compile(r"\\boxed\s*\{|[{}]")
_FRAC = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_LATEX = re.compile(r"\\(?:(?:times|cdot|ast|div|left|right|quad)(?![a-zA-Z])|[()\[\],;:! ])|\{,\}")
_LATEX_TO = {"\\times": "*", "\\cdot": "*", "\\ast": "*", "\\div": "/", "{,}": ","}
_ASIDE = re.compile(r"\(\s*=([^()=]*)\)\s*$")  # of an expression, as in 3*8 (= 24)
_WRAPPING = " \t\r\n$`"
BLANK = "\u115f\u1160\u3164\uffa0"  # Hangul fillers: letters that nobody sees
OPEN = "its thoughts do not end"
_MAX_NESTING = 16  # of \frac in \frac

Span = tuple[int, int]
"""Where a piece of a text begins and ends."""


@dataclass(frozen=True, slots=True)
class Found:
    """The answer as written, or None with the reason.

    Well-formed: exactly one tag, opened and closed after the thoughts, with a letter or digit in it.
    """

    text: str | None
    well_formed: bool
    reason: str = ""


def find_answer(text: str) -> Found:
    """What the model gave as its answer.

    >>> find_answer("<think>2+2</think><answer> 4 </answer>")
    Found(text='4', well_formed=True, reason='')
    >>> find_answer(r"so it is $\\boxed{\\frac{1}{2}}$.")
    Found(text='((1)/(2))', well_formed=False, reason='')
    >>> find_answer("it is 4").reason
    'no answer tag'
    """
    said, is_open = after_thoughts(text)
    tag, _ = last_tag(said)
    _, num_marks = last_tag(text)
    span = tag or last_box(said)
    if span is None:
        none = "no closed answer tag" if num_marks else "no answer tag"
        return Found(None, False, OPEN if is_open else none)
    well_formed = tag is not None and num_marks == 2 and has_text(said[slice(*tag)])
    inside = inner_box(said[slice(*span)])
    if len(inside) > MAX_CHARS:
        return Found(None, well_formed, f"the answer is longer than {MAX_CHARS} characters")
    return Found(plain(inside), well_formed)


def after_thoughts(text: str) -> tuple[str, bool]:
    """What is not thought, and whether the thoughts go on to the end.

    Only what follows the last `</think>` counts (the prompt may have opened the thoughts), and nothing from a `<think>`
    on that is not closed.

    >>> after_thoughts("<think>4? <answer>4</answer></think>It is 5.")
    ('It is 5.', False)
    >>> after_thoughts("Hm. <think>4? <answer>4</answer>")
    ('Hm. ', True)
    """
    said, opened, _ = text.rpartition("</think>")[2].partition("<think>")
    return said, bool(opened)


def has_text(text: str) -> bool:
    """Whether there is a letter or digit to be seen."""
    return any(c.isalnum() and c not in BLANK for c in text)


def inner_box(answer: str) -> str:
    """Without the box inside a tag, or inside a box; a long text is left as it is."""
    for _ in range(2):
        if len(answer) <= MAX_CHARS and "\\boxed" in answer and (span := last_box(answer)) and span[0] < span[1]:
            answer = answer[slice(*span)]
    return answer


def last_tag(text: str) -> tuple[Span | None, int]:
    """Content of the last closed tag (the innermost when nested), and the number of tag marks."""
    start: int | None = None
    inside: Span | None = None
    num_marks = 0
    for mark in _TAG.finditer(text):
        num_marks += 1
        if mark[0] == "<answer>":
            start = mark.end()
        elif start is not None:
            inside = start, mark.start()
            start = None
    return inside, num_marks


def last_box(text: str) -> Span | None:
    """Content of the \\boxed{...} that closes last; braces inside it must balance."""
    open_braces: list[int | None] = []  # where the content starts, None for braces that are not a box
    inside: Span | None = None
    for mark in _BOX.finditer(text):
        if mark[0] == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                inside = start, mark.start()
        else:
            open_braces.append(mark.end() if mark[0] != "{" else None)
    return inside


def plain(text: str) -> str:
    """LaTeX as plain arithmetic, without what wraps an answer.

    >>> plain("$(3 \\\\times 4) \\\\div 2$.")
    '(3 * 4) / 2'
    >>> plain("**1{,}200**")
    '1,200'
    """
    for _ in range(_MAX_NESTING):
        text, num_replaced = _FRAC.subn(r"((\1)/(\2))", text)
        if not num_replaced:
            break
    text = _LATEX.sub(lambda match: _LATEX_TO.get(match[0], " "), text)
    text = text.strip(_WRAPPING).removesuffix(".").strip(_WRAPPING)
    if text.startswith("**") and text.endswith("**") and len(text) > 4:
        text = text[2:-2].strip(_WRAPPING).removesuffix(".")
    return text


def read_value(answer: str) -> Evaluation:
    """The number an answer states: after the last "=" if there is one. An expression is not a value.

    >>> read_value("12 * 2 = 24").value
    Fraction(24, 1)
    >>> read_value("12 * 2").reason
    'not a number'
    """
    return read_number(answer.rpartition("=")[2])


def read_expression(answer: str) -> Evaluation:
    """The expression an answer states: before the first "=", or after it if only a number is before it.

    All sides must be equal.

    >>> read_expression("(1+2)*8 = 24").value
    Fraction(24, 1)
    >>> read_expression("(1+2)*8 = 25").reason
    'it says "= 25", which it is not'
    >>> read_expression("24 = (1+2)*8").numbers == read_expression("(1+2)*8 (= 24)").numbers == (1, 2, 8)
    True
    """
    left, *rest = _ASIDE.sub(r"=\1", answer).split("=", 3)
    if rest and read_number(left).value is not None:
        left, rest = rest[0], [left, *rest[1:]]
    result = evaluate(left)
    for claim in rest:
        if result.value is not None and evaluate(claim).value != result.value:
            return Evaluation(
                numbers=result.numbers,
                num_operations=result.num_operations,
                reason=f'it says "= {claim.strip()[:20]}", which it is not',
            )
    return result
