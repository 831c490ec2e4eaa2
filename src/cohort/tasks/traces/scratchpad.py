"""Written computation of sums: steps short enough that a small model gets each one right.

Products are computed before sums. A product of large factors is first written as a sum of partial products:

>>> solve("12 + 7 * 3")
(['7*3=21', '12+21=33'], 33)
>>> solve("47 * 86 - 5")
(['47*86=3760+282=4042', '4042-5=4037'], 4037)
"""

from __future__ import annotations

import re

TOKEN = re.compile(r"\d+|[-+*]")


def solve(expression: str) -> tuple[list[str], int]:
    """Returns the steps of computing an expression as texts, and its value. A single number has no steps.

    The expression is integers without signs, joined by + - * without parentheses; spaces are ignored.
    """
    parts = TOKEN.findall(expression)
    values = [int(p) for p in parts[0::2]]
    operators = parts[1::2]
    steps: list[str] = []
    # Every step replaces two neighbouring values by their result: first all products, then sums, from left to right.
    for level in ("*", "+-"):
        i = 0
        while i < len(operators):
            if operators[i] not in level:
                i += 1
                continue
            text, value = apply_operator(values[i], operators[i], values[i + 1])
            steps.append(text)
            values[i : i + 2] = [value]
            del operators[i]
    return steps, values[0]


def apply_operator(a: int, op: str, b: int) -> tuple[str, int]:
    """Returns the text of one step, the computation of `a op b` with + - or *, and its value.

    Products of large factors are written with partial products and their running sums.

    >>> apply_operator(123, "*", 7)
    ('123*7=700+161=861', 861)
    """
    if op != "*":
        value = a + b if op == "+" else a - b
        return f"{a}{op}{b}={value}", value
    sums = list_running_sums(compute_partial_products(a, b))
    return f"{a}*{b}=" + "=".join("+".join(map(str, s)) for s in sums), a * b


def compute_partial_products(a: int, b: int) -> list[int]:
    """Returns the partial products of a * b that are not zero, highest place first; [0] if the product is 0.

    Both factors must be 0 or more. Factors up to 9999 give products that a small model can memorise: at most two digits
    times one digit, times a power of ten.
    """
    long, short = (a, b) if len(str(a)) >= len(str(b)) else (b, a)
    heads = [long] if long < 100 else [long - long % 100, long % 100]
    digits = [int(d) * 10**i for i, d in enumerate(reversed(str(short)))]
    products = [h * d for d in reversed(digits) for h in heads if h * d]
    return products or [0]


def list_running_sums(terms: list[int]) -> list[list[int]]:
    """Returns the stages of adding terms from the left: [a, b, c] -> [[a, b, c], [a + b, c], [a + b + c]]."""
    sums = [list(terms)]
    while len(terms) > 1:
        terms = [terms[0] + terms[1], *terms[2:]]
        sums.append(terms)
    return sums
