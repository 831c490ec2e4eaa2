"""Capital letters and small ones."""

from __future__ import annotations

import re

from cohort.tasks.ifeval.instructions.keywords import Relation, compare
from cohort.tasks.ifeval.instructions.language import detect

# Words as the reference's tokenizer has them, as far as their capitals can be counted: signs stand alone, and
# contractions are two words ("DON'T" is DO and N'T, "CANNOT" is CAN and NOT).
_BETWEEN = re.compile(
    r"""[\s"`;@#$%&?!*\[\](){}<>\u00ab\u00bb\u2018\u2019\u201c\u201d\u201e]|--|''|\.\.+|[:,](?!\d)"""
    r"""|\.(?=[\s"';:@?!*\[\](){}]|[\u00bb\u2019\u201d]*\s*\Z)|'(?![mtsdnMTSDN])(?=\w\b)"""
)
_CLITICS = (
    re.compile(r"(?<=[^'])'\Z"),
    re.compile(r"(?<=[^'])'[sSmMdD]\Z"),
    re.compile(r"(?<=[^'])(?:'ll|'LL|'re|'RE|'ve|'VE|n't|N'T)\Z"),
)
_JOINED = re.compile(
    r"\b(can)(not)\b|\b(d)('ye)\b|\b(gim|lem)(me)\b|\b(gon)(na)\b|\b(wan)(na)\Z|\b(got)(ta)\b|\b(more)('n)\b"
    r"|\A('t)(is|was)\b",
    re.IGNORECASE,
)


def english_capital(text: str) -> bool:
    """English, and no small letter."""
    return text.isupper() and detect(text) in ("en", None)


def english_lowercase(text: str) -> bool:
    """English, and no capital letter."""
    return text.islower() and detect(text) in ("en", None)


def capital_word_frequency(text: str, *, capital_relation: Relation, capital_frequency: int) -> bool:
    """How many words are all capitals; "I" and "A" are such words."""
    return compare(count_capital_words(text), capital_relation, capital_frequency)


def count_capital_words(text: str) -> int:
    """
    >>> count_capital_words("I DON'T KNOW, said NASA's chief.")
    5
    """
    return sum(map(_capitals, _BETWEEN.split(text)))


def _capitals(word: str) -> int:
    if not word or word.islower():
        return 0
    parts = []
    for clitic in _CLITICS:
        if found := clitic.search(word):
            parts.append(found[0])
            word = word[: found.start()]
    return sum(piece.isupper() for part in (word, *parts) for piece in _JOINED.split(part) if piece)
