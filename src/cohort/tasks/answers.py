"""Functions that find the final answer in the text that a model wrote.

Thoughts are not part of the answer (`remove_thoughts`). In the text after them, the last closed `<answer>...</answer>`
counts; if there is none, the last closed `\\boxed{...}`. LaTeX, dollar signs, bold marks and a final period around and
inside the answer are removed. Anything else stays, and the function that reads the answer may refuse it. All scans are
single passes, so that time is linear in the length of the text.
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
_ASIDE = re.compile(r"\(\s*=([^()=]*)\)\s*$")  # a value in parentheses after an expression, as in 3*8 (= 24)
_WRAPPING = " \t\r\n$`"
INVISIBLE_LETTERS = "\u115f\u1160\u3164\uffa0"  # Hangul fillers: letters without a visible shape
UNFINISHED_THOUGHTS = "its thoughts do not end"  # a reason why there is no answer
_MAX_NESTING = 16  # levels of \frac inside \frac

Span = tuple[int, int]
"""Start and end of a piece of text, as in text[start:end]."""


@dataclass(frozen=True, slots=True)
class ExtractedAnswer:
    """The answer as written, or None and the reason why there is none.

    It is well-formed if the text has exactly one answer tag, opened and closed after the thoughts, with a letter or
    digit in it.
    """

    text: str | None
    well_formed: bool
    reason: str = ""


def find_answer(text: str) -> ExtractedAnswer:
    """Returns the final answer in a completion: the last closed answer tag or, without one, the last closed box.

    Simple LaTeX in the answer is written as plain arithmetic (see `simplify_latex`). Thoughts are not searched. If
    there is no answer, or it is longer than MAX_CHARS characters, `text` is None and `reason` says why. An answer
    without a tag is never well-formed.

    >>> find_answer("<think>2+2</think><answer> 4 </answer>")
    ExtractedAnswer(text='4', well_formed=True, reason='')
    >>> find_answer(r"so it is $\\boxed{\\frac{1}{2}}$.")
    ExtractedAnswer(text='((1)/(2))', well_formed=False, reason='')
    >>> find_answer("it is 4").reason
    'no answer tag'
    """
    said, is_open = remove_thoughts(text)
    tag, _ = find_last_tag(said)
    # Tags are counted in the whole text: one in the thoughts makes the answer badly formed.
    _, num_marks = find_last_tag(text)
    span = tag or find_last_box(said)
    if span is None:
        reason = "no closed answer tag" if num_marks else "no answer tag"
        return ExtractedAnswer(None, False, UNFINISHED_THOUGHTS if is_open else reason)
    well_formed = tag is not None and num_marks == 2 and has_visible_text(said[slice(*tag)])
    inside = unwrap_box(said[slice(*span)])
    if len(inside) > MAX_CHARS:
        return ExtractedAnswer(None, well_formed, f"the answer is longer than {MAX_CHARS} characters")
    return ExtractedAnswer(simplify_latex(inside), well_formed)


def remove_thoughts(text: str) -> tuple[str, bool]:
    """Returns the text outside the thoughts (<think>...</think>), and whether the text ends inside a thought.

    The returned text begins after the last `</think>`, even without a `<think>` before it, because the prompt may have
    opened the thoughts; everything before is dropped. It ends at a `<think>` that is not closed.

    >>> remove_thoughts("<think>4? <answer>4</answer></think>It is 5.")
    ('It is 5.', False)
    >>> remove_thoughts("Hm. <think>4? <answer>4</answer>")
    ('Hm. ', True)
    """
    said, opened, _ = text.rpartition("</think>")[2].partition("<think>")
    return said, bool(opened)


def has_visible_text(text: str) -> bool:
    """Returns whether the text has a letter or digit, not counting the letters without a shape in INVISIBLE_LETTERS."""
    return any(c.isalnum() and c not in INVISIBLE_LETTERS for c in text)


def unwrap_box(answer: str) -> str:
    """Returns the content of the `\\boxed{...}` that closes last in an answer, or the answer unchanged.

    It is unchanged if no box closes, if the box that closes last is empty (even after a filled one), or if the answer
    has more than MAX_CHARS characters. The content is unwrapped once more in the same way, so that of nested boxes the
    two outermost are removed.
    """
    # Twice, for a box inside a box inside a tag.
    for _ in range(2):
        if len(answer) <= MAX_CHARS and "\\boxed" in answer and (span := find_last_box(answer)) and span[0] < span[1]:
            answer = answer[slice(*span)]
    return answer


def find_last_tag(text: str) -> tuple[Span | None, int]:
    """Returns the place of the content of the last closed `<answer>` tag, and how many answer tags occur.

    The place is (start, end), or None if no tag is closed. Of nested tags the innermost counts. Opening and closing
    tags are counted one by one, so that one well-formed answer gives 2.
    """
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


def find_last_box(text: str) -> Span | None:
    """Returns (start, end) of the content of the `\\boxed{...}` that closes last; None if no box closes.

    Of nested boxes that is the outermost closed one. Braces inside the box must balance; `\\{` and `\\}`
    count as braces too.
    """
    boxes = find_boxes(text)
    return boxes[-1] if boxes else None


def find_boxes(text: str) -> list[Span]:
    """Returns (start, end) of the content of every closed `\\boxed{...}` that is in no other closed box, in order.

    Braces inside a box must balance; `\\{` and `\\}` count as braces too.
    """
    # Per open brace where the content of its box starts; None for a brace that opens no box.
    open_braces: list[int | None] = []
    boxes: list[Span] = []
    for mark in _BOX.finditer(text):
        if mark[0] == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                # the boxes inside the one that closes here
                while boxes and boxes[-1][0] > start:
                    boxes.pop()
                boxes.append((start, mark.start()))
        else:
            open_braces.append(mark.end() if mark[0] != "{" else None)
    return boxes


def simplify_latex(text: str) -> str:
    """Returns an answer with simple LaTeX written as plain arithmetic, and without the marks around it.

    Fractions, \\times, \\cdot, \\ast, \\div, \\left, \\right, \\quad and spacing are replaced; other LaTeX stays.
    Removed from the ends are spaces, dollar signs, backticks, a pair of bold marks, and one final period.

    >>> simplify_latex("$(3 \\\\times 4) \\\\div 2$.")
    '(3 * 4) / 2'
    >>> simplify_latex("**1{,}200**")
    '1,200'
    """
    # Each round replaces the innermost fractions, so that their parents have no braces inside in the next round.
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
    """Returns the number that an answer states, after the last "=" if there is one.

    An expression that is not computed, and a number with a unit, are refused: `value` is None and `reason` says why.

    >>> read_value("12 * 2 = 24").value
    Fraction(24, 1)
    >>> read_value("12 * 2").reason
    'not a number'
    """
    return read_number(answer.rpartition("=")[2])


def read_expression(answer: str) -> Evaluation:
    """Returns the value of the expression that an answer states, and the numbers that are written in it.

    The expression is the text before the first "=", or after it if the text before it is only a number. A final "(=
    24)" is read as "= 24". All sides of the equation, at most four, must be equal; otherwise, and if the expression is
    refused, `value` is None and `reason` says why.

    >>> read_expression("(1+2)*8 = 24").value
    Fraction(24, 1)
    >>> read_expression("(1+2)*8 = 25").reason
    'it says "= 25", which it is not'
    >>> read_expression("24 = (1+2)*8").numbers == read_expression("(1+2)*8 (= 24)").numbers == (1, 2, 8)
    True
    """
    expression, *claims = _ASIDE.sub(r"=\1", answer).split("=", 3)
    if claims and read_number(expression).value is not None:
        expression, claims = claims[0], [expression, *claims[1:]]
    result = evaluate(expression)
    for claim in claims:
        if result.value is not None and evaluate(claim).value != result.value:
            return Evaluation(
                numbers=result.numbers,
                num_operations=result.num_operations,
                reason=f'it says "= {claim.strip()[:20]}", which it is not',
            )
    return result
