"""Screens for graders that run an answer as Python: which answers may be handed to them.

Some graders of reasoning-gym call `eval` on the answer, or sympy's `parse_expr`, which calls it too. A model can learn
to write any text, so such an answer is looked at first.
"""

from __future__ import annotations

import re

from cohort.tasks.reasoning_gym.faults import EVALUATED, PARSED_BY_SYMPY

# Names that an expression may use besides single letters.
FUNCTIONS = frozenset(
    {
        *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
        *("asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "pi", "erf", "abs", "Abs", "Rational"),
    }
)
_EXPRESSION = re.compile(r"[A-Za-z0-9+\-*/^().,\s]*")
_WORD = re.compile(r"[A-Za-z]+")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z]")


def find_code(name: str, text: str) -> str:
    """Returns why an answer to the data set `name` must not be handed to its grader; "" if it may be.

    >>> find_code("n_queens", "[['Q', '_']]"), find_code("chain_sum", "exit()")
    ('', '')
    >>> find_code("n_queens", "exit()")
    'the answer has parentheses, and the grader would run it as Python'
    >>> find_code("simple_integration", "x**2/2 + C"), find_code("simple_integration", "exit(1)")
    ('', 'the answer is no plain expression ("exit"), and the grader would run it as Python')
    """
    # Without parentheses nothing can be called in an expression, and `eval` takes no statements.
    if name in EVALUATED and "(" in text:
        return "the answer has parentheses, and the grader would run it as Python"
    if name in PARSED_BY_SYMPY and (odd := _find_odd_part(text)):
        return f'the answer is no plain expression ("{odd}"), and the grader would run it as Python'
    return ""


def _find_odd_part(text: str) -> str:
    """Returns the first part of a text that is none of numbers, signs, single letters and FUNCTIONS; "" if none."""
    end = len(_EXPRESSION.match(text)[0])  # type: ignore[index]  # it matches the empty text
    if end < len(text):
        return text[end]
    if attribute := _ATTRIBUTE.search(text):
        return attribute[0]
    return next((word for word in _WORD.findall(text) if len(word) > 1 and word not in FUNCTIONS), "")
