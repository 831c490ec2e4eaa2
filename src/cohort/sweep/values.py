"""The values of a swept setting, as a user writes them: `v1,v2`, `[a,b],[c]`, `"x,y",z`, or a range `1e-5..1e-3`.

A value is a list of texts, the words that would follow the flag: one for most settings, several for a list.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cohort.errors import ConfigError

Value = list[str]

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"(?:(log|lin):)?({_NUMBER})\.\.({_NUMBER})")
_WHOLE = re.compile(r"[+-]?\d+")
_CLOSING = {"[": "]", '"': '"', "'": "'"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A range of numbers from which values are drawn: `low` to `high`, both possible."""

    low: float
    high: float
    scale: Literal["log", "lin"]  # log = every factor is equally likely, lin = every difference
    is_whole: bool  # whether only whole numbers are drawn

    def draw_value(self, rng: random.Random) -> Value:
        """Returns a number of the range as text. A number that is not whole has three digits.

        >>> Span(low=3, high=3, scale="lin", is_whole=True).draw_value(random.Random(0))
        ['3']
        """
        if self.scale == "log":
            number = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        else:
            number = rng.uniform(self.low, self.high)
        if self.is_whole:
            # Each whole number has the same share of the range, also the first and the last.
            number = rng.randint(int(self.low), int(self.high)) if self.scale == "lin" else round(number)
            return [str(int(min(max(number, self.low), self.high)))]
        # Rounding to three digits must not leave the range.
        return [f"{min(max(float(f'{number:.3g}'), self.low), self.high):.12g}"]


def read_values(flag: str, words: Sequence[str]) -> list[Value] | Span:
    """Returns the values that the words after a flag stand for: one or several, or a range.

    `flag` is for messages. Several words without a comma are one value, for settings that take several words. Raises
    ConfigError for missing values, spaces after commas, open quotes or brackets, and ranges that are empty.

    >>> read_values("--a", ["1,2"]), read_values("--a", ["x", "y"]), read_values("--a", ["[x,y],[z]"])
    ([['1'], ['2']], [['x', 'y']], [['x', 'y'], ['z']])
    """
    if len(words) != 1:
        if loose := [word for word in words if word.startswith(",") or word.endswith(",")]:
            raise ConfigError(
                f'{flag} has a space beside the comma of "{loose[0]}". Write its values without spaces: {flag} v1,v2.'
            )
        return [list(words)]
    text = words[0]
    if (span := read_span(flag, text)) is not None:
        return span
    pieces = split_pieces(flag, text)
    return [_read_piece(flag, piece) for piece in pieces] if len(pieces) > 1 or text[:1] in _CLOSING else [[text]]


def read_span(flag: str, text: str) -> Span | None:
    """Returns the range that a text such as `1e-5..1e-3`, `log:8..64` or `lin:0.1..0.9` stands for; None if it is none.

    Without `log:` or `lin:` a range of whole numbers is lin, one of other positive numbers log, any other lin. Raises
    ConfigError if the first number is not below the second, or if a log range does not begin above 0.
    """
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    low, high = float(match[2]), float(match[3])
    is_whole = bool(_WHOLE.fullmatch(match[2]) and _WHOLE.fullmatch(match[3]))
    scale: Literal["log", "lin"] = "log" if match[1] == "log" or (not match[1] and low > 0 and not is_whole) else "lin"
    if not low < high or not math.isfinite(high - low):
        raise ConfigError(f"{flag} {text} is an empty range. Write the smaller number first.")
    if scale == "log" and low <= 0:
        raise ConfigError(f"{flag} {text}: a log range must begin above 0. Raise its first number, or write lin:.")
    return Span(low=low, high=high, scale=scale, is_whole=is_whole)


def split_pieces(flag: str, text: str) -> list[str]:
    """Splits a text at its commas. A comma in quotes, in brackets or before a space is part of a piece.

    Quotes and brackets count only at the beginning of a piece or, in brackets, of an item. Raises ConfigError for
    empty pieces, open quotes and open brackets.

    >>> split_pieces("--a", "1,2"), split_pieces("--a", '[a,"b]"],c'), split_pieces("--a", "first, second")
    (['1', '2'], ['[a,"b]"]', 'c'], ['first, second'])
    """
    pieces = [""]
    closing: list[str] = []  # what ends the open brackets and quotes, the innermost last
    before = ","
    for place, letter in enumerate(text):
        if closing and letter == closing[-1]:
            closing.pop()
        elif letter in _CLOSING and before in ",[" and (not closing or closing[-1] == "]"):
            closing.append(_CLOSING[letter])
        elif letter == "," and not closing and text[place + 1 : place + 2] != " ":
            pieces.append("")
            before = letter
            continue
        pieces[-1] += letter
        before = letter
    if closing:
        raise ConfigError(f'{flag} {text} lacks a closing {closing[-1]}. Add it, or put the text into "quotes".')
    if len(pieces) > 1 and "" in pieces:
        raise ConfigError(
            f'{flag} "{text}" has an empty value. Write its values as v1,v2 (a value with a comma: "a,b").'
        )
    return pieces


def _read_piece(flag: str, piece: str) -> Value:
    """Returns a piece as a value: the items of `[a,b]`, or the text itself, without the quotes around it."""
    if piece[0] == "[" and piece[-1] == "]":
        inner = piece[1:-1]
        return [_remove_quotes(item) for item in split_pieces(flag, inner)] if inner else []
    return [_remove_quotes(piece)]


def _remove_quotes(text: str) -> str:
    """Returns a text without the quotes that it begins and ends with, if it does."""
    return text[1:-1] if len(text) > 1 and text[0] in "\"'" and text[0] == text[-1] else text


def format_value(value: Value) -> str:
    """Returns a value as text for people: its words, in brackets if there are not exactly one.

    >>> format_value(["1e-4"]), format_value(["a", "b"])
    ('1e-4', '[a,b]')
    """
    return value[0] if len(value) == 1 else f"[{','.join(value)}]"
