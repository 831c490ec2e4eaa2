"""Words and letters that an answer must have, must not have, or must have often enough."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Relation = Literal["at least", "less than"]


def compare(count: int, relation: Relation, bound: int) -> bool:
    """The two relations of IFEval.

    >>> compare(3, "at least", 3), compare(3, "less than", 3)
    (True, False)
    """
    return count >= bound if relation == "at least" else count < bound


def existence(text: str, *, keywords: Sequence[str]) -> bool:
    """Every keyword occurs, in any case, inside other words too.

    >>> existence("Catalogue of dogs", keywords=["cat", "dog"])
    True
    """
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def frequency(text: str, *, keyword: str, relation: Relation, frequency: int) -> bool:
    """How often one keyword occurs, in any case, inside other words too."""
    found = re.finditer(re.escape(keyword.strip()), text, re.IGNORECASE)
    return compare(sum(1 for _ in found), relation, frequency)


def forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs, in any case; inside other words they are allowed.

    >>> forbidden_words("a scatter plot", forbidden_words=["cat"])
    True
    """
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, *, letter: str, let_relation: Relation, let_frequency: int) -> bool:
    """How often one letter, or sign, occurs in any case."""
    return compare(text.lower().count(letter.lower()), let_relation, let_frequency)
