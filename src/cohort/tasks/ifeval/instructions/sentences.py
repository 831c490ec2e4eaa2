"""Counting sentences as the reference of IFEval does, without the word lists it downloads.

The procedure is that of Punkt (Kiss and Strunk, 2006): a word with a full stop ends a sentence unless it is an
abbreviation, an initial, a number or an ellipsis; there the word that follows decides. What Punkt looks up among
20,000 words of newspaper text is decided here by the few words below and a default for all others, so the two can
differ where a capital follows an ellipsis, an initial or an abbreviation. Where the reference sees an end that a
reader would not ("e.g. this", "1. This", "**Bold.**") so does this.
"""

from __future__ import annotations

import re

_MARKS = re.escape("][)(}{\"';:*@?!")  # a word ends before one of these
_END = re.compile(rf"(?<!\S)\S*[.?!](?=[{_MARKS}]|\s+\S)")  # the last one before a space decides for all
_ROW_OF_MARKS = re.compile(rf"[.?!][{_MARKS}]")  # with no word before it: two ends
_LAST_WORD = re.compile(rf"[?!']?(?:(?!--)[^\s{_MARKS}])*\Z")
_NEXT_WORD = re.compile(rf"\s*(\.\.+|[^\s{_MARKS},.]{{1,40}}|\S)")
_NUMBER = re.compile(r"[.,]?\d[\d,.-]*")
_MAX_WORD = 40  # characters; no abbreviation is longer


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ABBREVIATIONS = _words(
    "mr mrs ms dr prof sen rep reps gen col lt maj adm st jr sr messrs inc corp co cos ltd bros vs ave ft yr ph.d "
    "jan feb aug sep sept oct nov dec tues wed fri a.m p.m a.d m.b.a u.s u.k u.n u.s.a u.s.s.r d.c n.y n.j n.c n.d n.h "
    "n.m s.c r.i l.a ala ariz calif colo conn fla ga ill kan ky mich minn nev ok okla ore pa tenn va vt wash wis l.p "
    "s.a b.v n.v j.b j.c j.j j.k j.p j.r c d e f g h k l m n p r s t v w"
)
_STARTERS = _words(  # with a capital they begin a sentence, even after an abbreviation
    "the this these it he they i your her there here when which while if in without since although though but so yet "
    "nor however moreover thus therefore instead finally still even some many most both does were please meanwhile "
    "according despite"
)
_UNSURE = _words(  # common words, but with a capital inside sentences too: in titles
    "a an that those she we you my his their our its what where why how who as at by for from of on to with after "
    "before until because and or then now first second next also once all each every no not never do did is are was "
    "can could will would should may might must have has had let just only perhaps maybe during"
)
_COMMON = _STARTERS | _UNSURE
_HEADINGS = _words(  # of newspaper columns: a number before one does not end a sentence
    "business commodities corrections credit dividend financing insider international leisure letters review who"
)


def count_sentences(text: str) -> int:
    """How many sentences a text has.

    >>> count_sentences("Mr. Smith came at 5 p.m. on Monday. Did he stay? No!")
    3
    >>> count_sentences("no full stop")
    1
    """
    count, begin = 0, 0
    for found in _END.finditer(text):
        count += _ROW_OF_MARKS.match(found[0]) is not None
        if _ends_sentence(text, found.end() - 1):
            count, begin = count + 1, found.end()
    rest = text[begin:].strip()
    return count + (rest.strip("])}\"'") != "" or (begin == 0 and rest != ""))


def _ends_sentence(text: str, at: int) -> bool:
    """Whether the mark at this place, with a mark or a word after it, ends one."""
    if text[at] != ".":
        return True
    before = text[max(0, at - _MAX_WORD) : at]
    last, following = _LAST_WORD.search(before), _NEXT_WORD.match(text, at + 1)
    assert last is not None and following is not None  # both match the empty string, or what `_END` has seen
    word, follower = last[0].lstrip("`&#-,").lower(), following[1].lower()
    first = following[1][0]
    continues = first.islower() or follower in (";", ":", ",", ".", "!", "?")
    if word.endswith("."):
        return first.isupper() and follower not in _UNSURE
    if len(word) == 1 and word.isalpha():
        is_first = before[:-1].rpartition("\n")[2].strip() == ""  # in its line
        is_label = before[-1].islower() or (is_first and word in "abi")  # of a list
        is_name = first.isupper() and not is_label and "\n" not in following[0] and follower not in _COMMON
        return not continues and not is_name and word not in _ABBREVIATIONS
    if word in _ABBREVIATIONS or word.rpartition("-")[2] in _ABBREVIATIONS:
        return first.isupper() and follower in _STARTERS
    if _NUMBER.fullmatch(word):
        return not continues and follower not in _HEADINGS
    return True
