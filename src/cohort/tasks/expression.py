"""A safe, exact evaluator for + - * / and parentheses, round or square. It never raises and never runs long.

    sum     = product (("+" | "-") product)*
    product = factor (("*" | "/") factor | bracket)*
    factor  = ("+" | "-")* (number | bracket)
    bracket = "(" sum ")" | "[" sum "]"

Every limit counts characters, digits, levels, operations or bits, so the verdict on an expression is the same
on a slow and on a fast machine. There is no power: `2**99**99` is refused while it is still tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 512
MAX_DIGITS = 128  # of one number
MAX_DEPTH = 32  # of nested parentheses
MAX_OPERATIONS = 64  # signs included
MAX_BITS = 2048  # of a numerator or denominator on the way

_TIMES = "\u00d7\u00b7\u22c5\u2217"  # multiplication sign, middle dot, dot operator, asterisk operator
_OVER = "\u00f7\u2215\u2044"  # division sign, division slash, fraction slash
_MINUS = "\u2212\u2013"  # minus sign, en dash
_UNICODE = str.maketrans(dict.fromkeys(_TIMES, "*") | dict.fromkeys(_OVER, "/") | dict.fromkeys(_MINUS, "-"))
_NUMBER = r"[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+"
_TOKEN = re.compile(rf"({_NUMBER})|(\*\*|//|[-+*/()\[\]])|(\s+)")
_LETTER_X = re.compile(r"(?<=[0-9)\]])(\s*)[xX](?=\s*[-+.0-9(\[])")
_CLOSING = {"(": ")", "[": "]"}
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_LITERAL = re.compile(rf"([-+]?)\s*({_NUMBER})")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An exact value with the numbers that were written to get it, or the reason there is none."""

    value: Fraction | None = None
    numbers: tuple[Fraction, ...] = ()
    num_operations: int = 0
    reason: str = ""


class _Refused(Exception):
    """Carries the reason out of the parser; never leaves this module."""


def normalize(text: str) -> str:
    r"""Unicode operators, and an x between factors, as ASCII ones.

    >>> normalize("3 \u00d7 (4 \u2212 1) \u00f7 2")
    '3 * (4 - 1) / 2'
    >>> normalize("3 x (4 - 1)")
    '3 * (4 - 1)'
    """
    return _LETTER_X.sub(r"\1*", text.translate(_UNICODE))


def evaluate(text: str) -> Evaluation:
    """The value of an expression.

    >>> evaluate("1/3 + 1/6").value
    Fraction(1, 2)
    >>> evaluate("8 / (4 - 4)").reason
    'division by zero'
    """
    if len(text) > MAX_CHARS:
        return Evaluation(reason=f"longer than {MAX_CHARS} characters")
    parser = _Parser()
    try:
        parser.read(normalize(text))
        value = parser.sum()
        if parser.peek():
            raise _Refused(f"unexpected {parser.peek()!r}")
    except _Refused as refused:
        return Evaluation(num_operations=parser.operations, reason=str(refused))
    return Evaluation(value=value, numbers=tuple(parser.numbers), num_operations=parser.operations)


def read_number(text: str) -> Evaluation:
    """The value of one written number: sign, thousands commas and decimals, but nothing to compute.

    >>> read_number("-1,200.50").value
    Fraction(-2401, 2)
    >>> read_number("3+4").reason
    'not a number'
    """
    if len(text) > MAX_CHARS:
        return Evaluation(reason=f"longer than {MAX_CHARS} characters")
    match = _LITERAL.fullmatch(normalize(text).strip())
    if match is None:
        return Evaluation(reason="not a number")
    try:
        value = _literal(match[2])
    except _Refused as refused:
        return Evaluation(reason=str(refused))
    return Evaluation(value=-value if match[1] == "-" else value, numbers=(value,))


def _literal(word: str) -> Fraction:
    if sum(map(str.isdigit, word)) > MAX_DIGITS:
        raise _Refused(f"a number of more than {MAX_DIGITS} digits")
    if "," in word:
        if not _GROUPED.fullmatch(word):
            raise _Refused(f"misplaced comma in {word!r}")
        word = word.replace(",", "")
    # int() is several times faster than parsing a Fraction, and nearly every number is whole
    return Fraction(int(word)) if word.isdigit() else Fraction(word)


class _Parser:
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.position = 0
        self.depth = 0
        self.operations = 0
        self.numbers: list[Fraction] = []

    def read(self, text: str) -> None:
        """Split into tokens; the whole input must be made of them."""
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise _Refused(f"unexpected character {text[position]!a}")
            if match[2] in ("**", "//"):
                raise _Refused(f"operator {match[2]!r} is not allowed")
            if match[3] is None:
                self.tokens.append(match[0])
            position = match.end()
        if not self.tokens:
            raise _Refused("empty")

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.position += 1
        return token

    def count(self) -> None:
        self.operations += 1
        if self.operations > MAX_OPERATIONS:
            raise _Refused(f"more than {MAX_OPERATIONS} operations")

    def sum(self) -> Fraction:
        value = self.product()
        while self.peek() in ("+", "-"):
            operator = self.take()
            self.count()
            right = self.product()
            value = _bounded(value + right if operator == "+" else value - right)
        return value

    def product(self) -> Fraction:
        value = self.factor()
        while self.peek() in ("*", "/", *_CLOSING):
            operator = "*" if self.peek() in _CLOSING else self.take()  # 3(4 - 1) is a product too
            self.count()
            right = self.factor()
            if operator == "/" and not right:
                raise _Refused("division by zero")
            value = _bounded(value * right if operator == "*" else value / right)
        return value

    def factor(self) -> Fraction:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.take() == "-"
            self.count()
        value = self.parenthesis() if self.peek() in _CLOSING else self.number()
        return -value if negative else value

    def parenthesis(self) -> Fraction:
        closing = _CLOSING[self.take()]
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _Refused(f"more than {MAX_DEPTH} nested parentheses")
        value = self.sum()
        if self.take() != closing:
            raise _Refused("a parenthesis is not closed")
        self.depth -= 1
        return value

    def number(self) -> Fraction:
        token = self.take()
        if not token:
            raise _Refused("ends where a number is expected")
        if token[0] not in "0123456789.":
            raise _Refused(f"{token!r} where a number is expected")
        value = _literal(token)
        self.numbers.append(value)
        return value


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _Refused(f"a value of more than {MAX_BITS} bits")
    return value
