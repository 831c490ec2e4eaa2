"""Finding the answer in what a model wrote.

The last well-formed `<answer>...</answer>` counts; without one, the last closed `\\boxed{...}`. Around and
inside it, LaTeX, dollar signs, bold marks and a final period are handled on purpose; the rest is left for the
reader of the answer to refuse. All scans are single passes: time is linear in the text.
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
_WRAPPING = " \t\r\n$`"
_MAX_NESTING = 16  # of \frac in \frac

Span = tuple[int, int]
"""Where a piece of a text begins and ends."""


@dataclass(frozen=True, slots=True)
class Found:
    """The answer as written, or None with the reason. Well-formed: exactly one tag, opened and closed."""

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
    tag, num_marks = last_tag(text)
    well_formed = tag is not None and num_marks == 2
    span = tag or last_box(text)
    if span is None:
        return Found(None, False, "no closed answer tag" if num_marks else "no answer tag")
    inside = inner_box(text[slice(*span)])
    if len(inside) > MAX_CHARS:
        return Found(None, well_formed, f"the answer is longer than {MAX_CHARS} characters")
    return Found(plain(inside), well_formed)


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
    """The expression an answer states: before the first "=". What follows must be equal to it.

    >>> read_expression("(1+2)*8 = 24").value
    Fraction(24, 1)
    >>> read_expression("(1+2)*8 = 25").reason
    'it says "= 25", which it is not'
    """
    left, *rest = answer.split("=", 3)
    result = evaluate(left)
    for claim in rest:
        if result.value is not None and evaluate(claim).value != result.value:
            return Evaluation(
                numbers=result.numbers,
                num_operations=result.num_operations,
                reason=f'it says "= {claim.strip()[:20]}", which it is not',
            )
    return result
