"""How an answer in words is found in a completion and compared with the accepted answers, as SQuAD does it.

Texts are compared after the published normalisation (arXiv:1606.05250, its evaluation script): lower case, without
ASCII punctuation, without the words a, an and the, with single spaces. `exact` is whether the rest is the same. `f1` is
the harmonic mean of precision and recall of its words, each counted as often as it occurs. Of several accepted answers
the best counts. There is one difference: texts of which nothing is left, such as "The" and "A", are compared as they
are, so that they are not equal to each other and to an empty text.

The answer is the last closed <answer>...</answer> after the thoughts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cohort.tasks.answers import UNFINISHED_THOUGHTS, find_last_tag, has_visible_text, remove_thoughts

MAX_CHARS = 2000  # of an answer; a longer one is wrong
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradedAnswer:
    """What is known of the answer in a completion."""

    is_right: bool = False  # whether it equals an accepted answer
    f1: float = 0.0  # 0 to 1
    is_tagged: bool = False  # whether there is one answer tag, closed, after the thoughts, with a letter or digit in it
    is_alone: bool = False  # whether it is tagged, and there is nothing else after the thoughts
    reason: str = ""  # why it is not right; "" if it is


def grade_answer(text: str, accepted: Sequence[str]) -> GradedAnswer:
    """Returns what the answer in a completion is worth, given the accepted answers.

    >>> grade_answer("It is <answer>the Eiffel Tower.</answer>", ["Eiffel Tower"])
    GradedAnswer(is_right=True, f1=1.0, is_tagged=True, is_alone=False, reason='')
    >>> grade_answer("the Eiffel Tower", ["Eiffel Tower"]).reason
    'no answer tag'
    """
    said, is_open = remove_thoughts(text)
    tag, _ = find_last_tag(said)
    # Tags are counted in the whole text: one in the thoughts makes the format wrong.
    _, num_marks = find_last_tag(text)
    if tag is None:
        reason = "no closed answer tag" if num_marks else "no answer tag"
        return GradedAnswer(reason=UNFINISHED_THOUGHTS if is_open else reason)
    answer = said[slice(*tag)]
    if not has_visible_text(answer):
        return GradedAnswer(reason="the answer tag is empty")
    is_tagged = num_marks == 2
    is_alone = is_tagged and said.strip() == f"<answer>{answer}</answer>"
    if len(answer) > MAX_CHARS:
        reason = f"the answer is longer than {MAX_CHARS} characters"
        return GradedAnswer(is_tagged=is_tagged, is_alone=is_alone, reason=reason)
    is_right = any(is_exact_match(answer, one) for one in accepted)
    f1 = max((compute_f1(answer, one) for one in accepted), default=0.0)
    reason = "" if is_right else "another answer" if f1 == 0 else f"not exact: F1 is {f1:.2f}"
    return GradedAnswer(is_right=is_right, f1=f1, is_tagged=is_tagged, is_alone=is_alone, reason=reason)


def normalise(text: str) -> str:
    """Returns the text as SQuAD compares it.

    >>> normalise("  The  U.S.A. and a  cat's tail! ")
    'usa and cats tail'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _split_words(text: str) -> list[str]:
    """Returns the words of the normalised text; those of the text itself if the normalised one is empty."""
    return normalise(text).split() or text.lower().split()


def is_exact_match(answer: str, accepted: str) -> bool:
    """Returns whether two texts are the same after normalisation."""
    return _split_words(answer) == _split_words(accepted)


def compute_f1(answer: str, accepted: str) -> float:
    """Returns the F1 of the words of two texts after normalisation, from 0 to 1. It is 1 for two empty texts.

    >>> compute_f1("in Paris, France", "Paris")  # precision 1/3, recall 1
    0.5
    """
    said, wanted = _split_words(answer), _split_words(accepted)
    if not said or not wanted:
        return float(said == wanted)
    num_common = sum((Counter(said) & Counter(wanted)).values())
    # 2 p r / (p + r) with p = common / said and r = common / wanted.
    return 2 * num_common / (len(said) + len(wanted))
