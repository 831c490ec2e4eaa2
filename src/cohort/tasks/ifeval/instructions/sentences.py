"""Counts sentences as the reference checker of IFEval does, without the word lists that it downloads.

The procedure is that of Punkt (Kiss and Strunk, 2006). A word with a full stop ends a sentence, unless it is an
abbreviation, an initial, a number or an ellipsis; for these, the next word decides. Punkt looks words up in a list of
20,000 words of newspaper text. Here the few words below decide, with one default for all others. So the two can differ
if a capital follows an ellipsis, an initial or an abbreviation. Ends that the reference sees and a reader would not see
("e.g. this", "1. This", "**Bold.**") are counted here too.
"""

from __future__ import annotations

import re

# Characters that end a word.
_WORD_BREAKS = re.escape("][)(}{\"';:*@?!")
# A mark that may end a sentence. Of several marks without a space between them, the last one is matched.
_POSSIBLE_END = re.compile(rf"(?<!\S)\S*[.?!](?=[{_WORD_BREAKS}]|\s+\S)")
# Marks with no word before them count as an end of their own.
_MARKS_WITHOUT_WORD = re.compile(rf"[.?!][{_WORD_BREAKS}]")
_LAST_WORD = re.compile(rf"[?!']?(?:(?!--)[^\s{_WORD_BREAKS}])*\Z")
_NEXT_WORD = re.compile(rf"\s*(\.\.+|[^\s{_WORD_BREAKS},.]{{1,40}}|\S)")
_NUMBER = re.compile(r"[.,]?\d[\d,.-]*")
# How far back the word before a full stop is read; no abbreviation is longer.
_MAX_WORD_CHARS = 40


def _make_word_set(text: str) -> frozenset[str]:
    """Returns the set of the words in a text, which are separated by spaces."""
    return frozenset(text.split())


_ABBREVIATIONS = _make_word_set(
    "mr mrs ms dr prof sen rep reps gen col lt maj adm st jr sr messrs inc corp co cos ltd bros vs ave ft yr ph.d "
    "jan feb aug sep sept oct nov dec tues wed fri a.m p.m a.d m.b.a u.s u.k u.n u.s.a u.s.s.r d.c n.y n.j n.c n.d n.h "
    "n.m s.c r.i l.a ala ariz calif colo conn fla ga ill kan ky mich minn nev ok okla ore pa tenn va vt wash wis l.p "
    "s.a b.v n.v j.b j.c j.j j.k j.p j.r c d e f g h k l m n p r s t v w"
)
# With a capital, these begin a sentence even after an abbreviation.
_SENTENCE_STARTERS = _make_word_set(
    "the this these it he they i your her there here when which while if in without since although though but so yet "
    "nor however moreover thus therefore instead finally still even some many most both does were please meanwhile "
    "according despite"
)
# Common words that may have a capital inside a sentence too, namely in titles.
_COMMON_IN_TITLES = _make_word_set(
    "a an that those she we you my his their our its what where why how who as at by for from of on to with after "
    "before until because and or then now first second next also once all each every no not never do did is are was "
    "can could will would should may might must have has had let just only perhaps maybe during"
)
_COMMON_WORDS = _SENTENCE_STARTERS | _COMMON_IN_TITLES
# Headings of newspaper columns. A number before one of these does not end a sentence.
_HEADINGS = _make_word_set(
    "business commodities corrections credit dividend financing insider international leisure letters review who"
)


def count_sentences(text: str) -> int:
    """Returns the number of sentences in a text by the rules of the Punkt splitter; 0 for a blank text.

    Text after the last end counts as one more. Only a short fixed list of English abbreviations such as "Mr." and
    "p.m." is known: after any other, as in "e.g. this" or "etc. was", a sentence ends. So does it after the number in
    "1. This", and after a known abbreviation before "The" and similar words. A full stop inside "3.5" ends nothing.

    >>> count_sentences("Mr. Smith came at 5 p.m. on Monday. Did he stay? No!")
    3
    >>> count_sentences("no full stop")
    1
    """
    # `begin` is where the text after the last sentence begins.
    count = begin = 0
    for match in _POSSIBLE_END.finditer(text):
        count += _MARKS_WITHOUT_WORD.match(match[0]) is not None
        if _ends_sentence(text, match.end() - 1):
            count, begin = count + 1, match.end()
    rest = text[begin:].strip()
    # Closing brackets and quotation marks belong to the sentence before them.
    return count + (rest.strip("])}\"'") != "" or (begin == 0 and rest != ""))


def _ends_sentence(text: str, position: int) -> bool:
    """Returns whether the mark (full stop, "?" or "!") at `position` ends a sentence. A mark or word must follow it.

    "?" and "!" always do, and so does a full stop, unless it belongs to an ellipsis, a single letter, a known
    abbreviation or a number: then the next word decides.
    """
    # Question and exclamation marks always end one; the rest is about full stops.
    if text[position] != ".":
        return True
    before = text[max(0, position - _MAX_WORD_CHARS) : position]
    last, following = _LAST_WORD.search(before), _NEXT_WORD.match(text, position + 1)
    # `_LAST_WORD` matches the empty string too, and `_POSSIBLE_END` has made sure that something follows.
    assert last is not None and following is not None
    word, next_word = last[0].lstrip("`&#-,").lower(), following[1].lower()
    first = following[1][0]
    continues = first.islower() or next_word in (";", ":", ",", ".", "!", "?")
    # an ellipsis
    if word.endswith("."):
        return first.isupper() and next_word not in _COMMON_IN_TITLES
    # a single letter: an initial, as in "J. Smith", or the label of a list, as in "a. Bread"
    if len(word) == 1 and word.isalpha():
        is_first_in_line = before[:-1].rpartition("\n")[2].strip() == ""
        is_label = before[-1].islower() or (is_first_in_line and word in "abi")
        is_name = first.isupper() and not is_label and "\n" not in following[0] and next_word not in _COMMON_WORDS
        return not continues and not is_name and word not in _ABBREVIATIONS
    if word in _ABBREVIATIONS or word.rpartition("-")[2] in _ABBREVIATIONS:
        return first.isupper() and next_word in _SENTENCE_STARTERS
    if _NUMBER.fullmatch(word):
        return not continues and next_word not in _HEADINGS
    return True
