"""A safe and exact evaluator of + - * / and parentheses, round or square. It never raises and never takes long.

    sum     = product (("+" | "-") product)*
    product = factor (("*" | "/") factor | bracket)*
    factor  = ("+" | "-")* (number | bracket)
    bracket = "(" sum ")" | "[" sum "]"

Every limit counts characters, digits, levels, operations or bits, never time, so that the result for an expression is
the same on a slow and on a fast machine. There is no power: `2**99**99` is refused before anything is computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 512  # of an expression
MAX_DIGITS = 128  # of one number
MAX_DEPTH = 32  # of nested parentheses
MAX_OPERATIONS = 64  # in an expression, signs included
MAX_BITS = 2048  # in the numerator or denominator of an intermediate result

_TIMES = "\u00d7\u00b7\u22c5\u2217"  # multiplication sign, middle dot, dot operator, asterisk operator
_OVER = "\u00f7\u2215\u2044"  # division sign, division slash, fraction slash
_MINUS = "\u2212\u2013"  # minus sign, en dash
_UNICODE = str.maketrans(dict.fromkeys(_TIMES, "*") | dict.fromkeys(_OVER, "/") | dict.fromkeys(_MINUS, "-"))
_NUMBER = r"[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+"
_TOKEN = re.compile(rf"({_NUMBER})|(\*\*|//|[-+*/()\[\]])|(\s+)")
# An x is a multiplication sign after a number or closing bracket and before a factor.
_LETTER_X = re.compile(r"(?<=[0-9)\]])(\s*)[xX](?=\s*[-+.0-9(\[])")
_CLOSING = {"(": ")", "[": "]"}
# Thousands commas are accepted only before every third digit.
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_LITERAL = re.compile(rf"([-+]?)\s*({_NUMBER})")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The exact value of an expression and the numbers written in it, or None and the reason why it has none."""

    value: Fraction | None = None
    numbers: tuple[Fraction, ...] = ()
    num_operations: int = 0
    reason: str = ""


class _RefusedError(Exception):
    """The reason why an expression is refused, on its way out of the parser. It never leaves this module."""


def normalize(text: str) -> str:
    r"""Returns the text with Unicode operators, and an x between factors, written as ASCII operators.

    >>> normalize("3 \u00d7 (4 \u2212 1) \u00f7 2")
    '3 * (4 - 1) / 2'
    >>> normalize("3 x (4 - 1)")
    '3 * (4 - 1)'
    """
    return _LETTER_X.sub(r"\1*", text.translate(_UNICODE))


def evaluate(text: str) -> Evaluation:
    """Returns the exact value of an expression with + - * / and brackets, or the reason why it is refused.

    Brackets are round or square, and one right after a factor multiplies it. A refused expression has the value None
    and no numbers; among others, powers, units and whatever exceeds a limit of this module are refused. Never raises.

    >>> evaluate("1/3 + 1/6").value
    Fraction(1, 2)
    >>> evaluate("8 / (4 - 4)").reason
    'division by zero'
    """
    if len(text) > MAX_CHARS:
        return Evaluation(reason=f"longer than {MAX_CHARS} characters")
    parser = _Parser()
    try:
        parser.tokenize(normalize(text))
        value = parser.parse_sum()
        # A sum that ends before the tokens do is followed by something that does not belong there.
        if parser.peek():
            raise _RefusedError(f"unexpected {parser.peek()!r}")
    except _RefusedError as refused:
        return Evaluation(num_operations=parser.operations, reason=str(refused))
    return Evaluation(value=value, numbers=tuple(parser.numbers), num_operations=parser.operations)


def read_number(text: str) -> Evaluation:
    """Returns the value of a text that is one number, perhaps with sign, thousands commas and decimals.

    `numbers` holds the number without its sign. Anything else, an expression too, is refused: `value` is None and
    `reason` says why.

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
        value = _parse_literal(match[2])
    except _RefusedError as refused:
        return Evaluation(reason=str(refused))
    return Evaluation(value=-value if match[1] == "-" else value, numbers=(value,))


def _parse_literal(word: str) -> Fraction:
    """Returns the value of an unsigned number, perhaps with thousands commas and decimals.

    Raises _RefusedError for too many digits and for misplaced commas.
    """
    if sum(map(str.isdigit, word)) > MAX_DIGITS:
        raise _RefusedError(f"a number of more than {MAX_DIGITS} digits")
    if "," in word:
        if not _GROUPED.fullmatch(word):
            raise _RefusedError(f"misplaced comma in {word!r}")
        word = word.replace(",", "")
    # int() is several times faster than parsing a Fraction, and nearly every number is whole.
    return Fraction(int(word)) if word.isdigit() else Fraction(word)


class _Parser:
    """A recursive-descent parser that evaluates while it parses. Its methods raise _RefusedError."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.position = 0  # index of the next token
        self.depth = 0  # of parentheses that are open
        self.operations = 0
        self.numbers: list[Fraction] = []  # in the order in which they are written

    def tokenize(self, text: str) -> None:
        """Splits a text into numbers, operators and parentheses and appends them to `tokens`.

        Raises _RefusedError if the text is empty or has other characters, or an operator `**` or `//`.
        """
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise _RefusedError(f"unexpected character {text[position]!a}")
            if match[2] in ("**", "//"):
                raise _RefusedError(f"operator {match[2]!r} is not allowed")
            if match[3] is None:
                self.tokens.append(match[0])
            position = match.end()
        if not self.tokens:
            raise _RefusedError("empty")

    def peek(self) -> str:
        """Returns the next token and does not move past it; "" at the end."""
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def next_token(self) -> str:
        """Returns the next token and moves past it; "" at the end."""
        token = self.peek()
        self.position += 1
        return token

    def count_operation(self) -> None:
        """Counts one more operation. Raises _RefusedError if there are more than MAX_OPERATIONS."""
        self.operations += 1
        if self.operations > MAX_OPERATIONS:
            raise _RefusedError(f"more than {MAX_OPERATIONS} operations")

    def parse_sum(self) -> Fraction:
        """Parses products joined by + and - from the next token on, and returns their value.

        Stops before the first token that does not belong to the sum. Raises _RefusedError for a malformed product and
        beyond the limits.
        """
        value = self.parse_product()
        while self.peek() in ("+", "-"):
            operator = self.next_token()
            self.count_operation()
            right = self.parse_product()
            value = _check_size(value + right if operator == "+" else value - right)
        return value

    def parse_product(self) -> Fraction:
        """Parses factors joined by * and / from the next token on, and returns their value.

        A bracket right after a factor multiplies it. Raises _RefusedError for a division by zero, a malformed factor,
        and beyond the limits.
        """
        value = self.parse_factor()
        while self.peek() in ("*", "/", *_CLOSING):
            # A parenthesis right after a factor multiplies it: 3(4 - 1) is a product too.
            operator = "*" if self.peek() in _CLOSING else self.next_token()
            self.count_operation()
            right = self.parse_factor()
            if operator == "/" and not right:
                raise _RefusedError("division by zero")
            value = _check_size(value * right if operator == "*" else value / right)
        return value

    def parse_factor(self) -> Fraction:
        """Parses a number or parenthesis with any number of signs before it, and returns its value.

        Every sign counts as an operation. Raises _RefusedError if neither follows.
        """
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.next_token() == "-"
            self.count_operation()
        value = self.parse_parenthesis() if self.peek() in _CLOSING else self.parse_number()
        return -value if negative else value

    def parse_parenthesis(self) -> Fraction:
        """Parses a sum in round or square brackets, which begin at the next token, and returns its value.

        Raises _RefusedError for more than MAX_DEPTH nested brackets, and if the closing bracket is missing or has
        another shape.
        """
        closing = _CLOSING[self.next_token()]
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _RefusedError(f"more than {MAX_DEPTH} nested parentheses")
        value = self.parse_sum()
        if self.next_token() != closing:
            raise _RefusedError("a parenthesis is not closed")
        self.depth -= 1
        return value

    def parse_number(self) -> Fraction:
        """Moves past the next token, which must be a number, appends its value to `numbers` and returns it.

        Raises _RefusedError if it is no number or there is none.
        """
        token = self.next_token()
        if not token:
            raise _RefusedError("ends where a number is expected")
        if token[0] not in "0123456789.":
            raise _RefusedError(f"{token!r} where a number is expected")
        value = _parse_literal(token)
        self.numbers.append(value)
        return value


def _check_size(value: Fraction) -> Fraction:
    """Returns the value unchanged. Raises _RefusedError if its numerator or denominator has more than MAX_BITS bits."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _RefusedError(f"a value of more than {MAX_BITS} bits")
    return value
