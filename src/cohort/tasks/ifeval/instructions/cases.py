"""Checks of capital and small letters."""

from __future__ import annotations

import re

from cohort.tasks.ifeval.instructions.keywords import Relation, satisfies_bound
from cohort.tasks.ifeval.instructions.language import detect_language

# These patterns split words as the tokenizer of the reference does, as far as it matters for capitals: signs are words
# of their own, and contractions are two words ("DON'T" is DO and N'T, "CANNOT" is CAN and NOT).
_WORD_SEPARATOR = re.compile(
    r"""[\s"`;@#$%&?!*\[\](){}<>\u00ab\u00bb\u2018\u2019\u201c\u201d\u201e]|--|''|\.\.+|[:,](?!\d)"""
    r"""|\.(?=[\s"';:@?!*\[\](){}]|[\u00bb\u2019\u201d]*\s*\Z)|'(?![mtsdnMTSDN])(?=\w\b)"""
)
# Endings that are split off a word, tried in this order.
_CLITICS = (
    re.compile(r"(?<=[^'])'\Z"),
    re.compile(r"(?<=[^'])'[sSmMdD]\Z"),
    re.compile(r"(?<=[^'])(?:'ll|'LL|'re|'RE|'ve|'VE|n't|N'T)\Z"),
)
_JOINED_WORDS = re.compile(
    r"\b(can)(not)\b|\b(d)('ye)\b|\b(gim|lem)(me)\b|\b(gon)(na)\b|\b(wan)(na)\Z|\b(got)(ta)\b|\b(more)('n)\b"
    r"|\A('t)(is|was)\b",
    re.IGNORECASE,
)


def is_english_capitals(text: str) -> bool:
    """Returns whether all letters of the text are capitals and langdetect finds English, or no language, in it.

    A text without letters is not in capitals. Short English texts may be taken for another language.
    """
    return text.isupper() and detect_language(text) in ("en", None)


def is_english_lowercase(text: str) -> bool:
    """Returns whether all letters of the text are small and langdetect finds English, or no language, in it.

    A text without letters is not in small letters. Short English texts may be taken for another language.
    """
    return text.islower() and detect_language(text) in ("en", None)


def has_capital_word_count(text: str, *, capital_relation: Relation, capital_frequency: int) -> bool:
    """Returns whether the text has "at least" or "less than" `capital_frequency` words in capitals.

    The relation is `capital_relation`. "I" and "A" are words in capitals too.
    """
    return satisfies_bound(count_capital_words(text), capital_relation, capital_frequency)


def count_capital_words(text: str) -> int:
    """Returns how many words of a text have capital letters and no small ones, such as "I", "NASA" and "B-52".

    A contraction such as "DON'T" is two words, and so is "CANNOT".

    >>> count_capital_words("I DON'T KNOW, said NASA's chief.")
    5
    """
    return sum(map(_count_capitals_in_word, _WORD_SEPARATOR.split(text)))


def _count_capitals_in_word(word: str) -> int:
    """Returns how many parts of a word are in capitals: 2 for "DON'T", whose parts are DO and N'T.

    Most words are a single part.
    """
    if not word or word.islower():
        return 0
    parts = []
    for clitic in _CLITICS:
        if match := clitic.search(word):
            parts.append(match[0])
            word = word[: match.start()]
    return sum(piece.isupper() for part in (word, *parts) for piece in _JOINED_WORDS.split(part) if piece)
