"""Checks of words and letters: those that an answer must have, must not have, or must have a number of times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Relation = Literal["at least", "less than"]


def satisfies_bound(count: int, relation: Relation, bound: int) -> bool:
    """Returns whether a count is "at least" or "less than" the bound, the two relations of IFEval.

    >>> satisfies_bound(3, "at least", 3), satisfies_bound(3, "less than", 3)
    (True, False)
    """
    return count >= bound if relation == "at least" else count < bound


def has_keywords(text: str, *, keywords: Sequence[str]) -> bool:
    """Returns whether every keyword occurs in the text, in upper or lower case, also as a part of other words.

    >>> has_keywords("Catalogue of dogs", keywords=["cat", "dog"])
    True
    """
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def has_keyword_count(text: str, *, keyword: str, relation: Relation, frequency: int) -> bool:
    """Returns whether the keyword occurs "at least" or "less than" (`relation`) `frequency` times.

    Upper and lower case are the same, the keyword also counts inside other words, and spaces around it are ignored.
    """
    matches = re.finditer(re.escape(keyword.strip()), text, re.IGNORECASE)
    return satisfies_bound(sum(1 for _ in matches), relation, frequency)


def has_no_forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """Returns whether none of the words occurs in the text, in upper or lower case.

    Inside other words they are allowed.

    >>> has_no_forbidden_words("a scatter plot", forbidden_words=["cat"])
    True
    """
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def has_letter_count(text: str, *, letter: str, let_relation: Relation, let_frequency: int) -> bool:
    """Returns whether the letter occurs "at least" or "less than" (`let_relation`) `let_frequency` times.

    Upper and lower case are the same.
    """
    return satisfies_bound(text.lower().count(letter.lower()), let_relation, let_frequency)
