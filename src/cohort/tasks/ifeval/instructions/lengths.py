"""How long an answer is: words, sentences, paragraphs."""

from __future__ import annotations

import re

from cohort.tasks.ifeval.instructions.keywords import Relation, compare
from cohort.tasks.ifeval.instructions.sentences import count_sentences

_WORD = re.compile(r"\w+")
_WORD_END = re.compile("[.,?!'\"]")


def number_words(text: str, *, relation: Relation, num_words: int) -> bool:
    """Words are runs of letters, digits and underscores: "it's" is two."""
    return compare(sum(1 for _ in _WORD.finditer(text)), relation, num_words)


def number_sentences(text: str, *, relation: Relation, num_sentences: int) -> bool:
    return compare(count_sentences(text), relation, num_sentences)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Paragraphs stand between lines of three asterisks; the first and the last may be empty, then they do not count.

    >>> number_paragraphs("one ***\\ntwo", num_paragraphs=2)
    True
    """
    first, *rest = (bool(part.strip()) for part in text.split("***"))
    inner, last = rest[:-1], rest[-1:]
    return all(inner) and first + len(inner) + sum(last) == num_paragraphs


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs stand between empty lines; one of them begins with a certain word, in any case.

    The place is counted with empty paragraphs, the number without: so does the reference.
    """
    paragraphs = [part.split(maxsplit=1) for part in text.split("\n\n")]
    num_filled = sum(map(bool, paragraphs))
    words = paragraphs[nth_paragraph - 1] if nth_paragraph <= num_filled else []
    if not words or num_filled != num_paragraphs:
        return False
    found = _WORD_END.split(words[0].lstrip("'").lstrip('"'), maxsplit=1)[0]
    return "".join(map(str.lower, found)) == first_word.lower()
