"""How the traces work a sum out: steps short enough for a small model to get each one right.

Products come before sums; a product of large factors is written as its partial products first:

>>> solve("12 + 7 * 3")
(['7*3=21', '12+21=33'], 33)
>>> solve("47 * 86 - 5")
(['47*86=3760+282=4042', '4042-5=4037'], 4037)
"""

from __future__ import annotations

import re

TOKEN = re.compile(r"\d+|[-+*]")


def solve(expression: str) -> tuple[list[str], int]:
    """The steps and the value of integers joined by + - * without parentheses."""
    parts = TOKEN.findall(expression)
    values, ops = [int(p) for p in parts[0::2]], parts[1::2]
    steps: list[str] = []
    for level in ("*", "+-"):
        at = 0
        while at < len(ops):
            if ops[at] not in level:
                at += 1
                continue
            text, value = apply(values[at], ops[at], values[at + 1])
            steps.append(text)
            values[at : at + 2] = [value]
            del ops[at]
    return steps, values[0]


def apply(a: int, op: str, b: int) -> tuple[str, int]:
    """One step as text, and its value.

    >>> apply(123, "*", 7)
    ('123*7=700+161=861', 861)
    """
    if op != "*":
        value = a + b if op == "+" else a - b
        return f"{a}{op}{b}={value}", value
    sums = running(partials(a, b))
    return f"{a}*{b}=" + "=".join("+".join(map(str, s)) for s in sums), a * b


def partials(a: int, b: int) -> list[int]:
    """Products a small model can know by heart: at most two digits times one digit, times a power of ten."""
    long, short = (a, b) if len(str(a)) >= len(str(b)) else (b, a)
    heads = [long] if long < 100 else [long - long % 100, long % 100]
    digits = [int(d) * 10**i for i, d in enumerate(reversed(str(short)))]
    found = [h * d for d in reversed(digits) for h in heads if h * d]
    return found or [0]


def running(terms: list[int]) -> list[list[int]]:
    """[a, b, c] -> [[a, b, c], [a + b, c], [a + b + c]]."""
    shown = [list(terms)]
    while len(terms) > 1:
        terms = [terms[0] + terms[1], *terms[2:]]
        shown.append(terms)
    return shown
