"""Checks of the length of an answer: words, sentences, paragraphs."""

from __future__ import annotations

import re

from cohort.tasks.ifeval.instructions.keywords import Relation, satisfies_bound
from cohort.tasks.ifeval.instructions.sentences import count_sentences

_WORD = re.compile(r"\w+")
_FIRST_WORD_END = re.compile("[.,?!'\"]")


def has_word_count(text: str, *, relation: Relation, num_words: int) -> bool:
    """Returns whether the text has "at least" or "less than" (`relation`) `num_words` words.

    Words are runs of letters, digits and underscores: "it's" is two words.
    """
    return satisfies_bound(sum(1 for _ in _WORD.finditer(text)), relation, num_words)


def has_sentence_count(text: str, *, relation: Relation, num_sentences: int) -> bool:
    """Returns whether the text has "at least" or "less than" (`relation`) `num_sentences` sentences.

    `count_sentences` counts them.
    """
    return satisfies_bound(count_sentences(text), relation, num_sentences)


def has_paragraph_count(text: str, *, num_paragraphs: int) -> bool:
    """Returns whether the text is exactly `num_paragraphs` paragraphs with three asterisks between them.

    Empty lines do not divide it. An empty first or last paragraph does not count. Any other empty paragraph makes the
    result False.

    >>> has_paragraph_count("one ***\\ntwo", num_paragraphs=2)
    True
    """
    first, *rest = (bool(part.strip()) for part in text.split("***"))
    inner, last = rest[:-1], rest[-1:]
    return all(inner) and first + len(inner) + sum(last) == num_paragraphs


def has_first_word_in_paragraph(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Returns whether the text has `num_paragraphs` paragraphs and number `nth_paragraph` begins with `first_word`.

    Empty lines separate paragraphs. Upper and lower case are the same. Quotation marks before the word are ignored, and
    it ends at a space or one of . , ? ! ' ". As in the reference checker, empty paragraphs count for the place of the
    nth paragraph, but not for the number of paragraphs.
    """
    paragraphs = [part.split(maxsplit=1) for part in text.split("\n\n")]
    num_filled = sum(map(bool, paragraphs))
    words = paragraphs[nth_paragraph - 1] if nth_paragraph <= num_filled else []
    if not words or num_filled != num_paragraphs:
        return False
    word = _FIRST_WORD_END.split(words[0].lstrip("'").lstrip('"'), maxsplit=1)[0]
    # Letter by letter, as in the reference: a few characters become lower case differently in a word than alone, for
    # example a final sigma.
    return "".join(map(str.lower, word)) == first_word.lower()
