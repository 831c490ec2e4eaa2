"""Answers in words: finding them, exact match and F1, on cases worked out by hand and against the published formula."""

from __future__ import annotations

import re
import string
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.tasks.search.grading import MAX_CHARS, compute_f1, grade_answer, is_exact_match, normalise

# answer, accepted, whether they match exactly, F1
COMPARED = [
    ("Paris", "Paris", True, 1.0),
    ("paris", "PARIS", True, 1.0),
    ("The Eiffel Tower.", "Eiffel tower", True, 1.0),
    ("  a  cat \n", "cat", True, 1.0),
    ("U.S.A.", "USA", True, 1.0),
    ("well-known", "wellknown", True, 1.0),  # punctuation goes without a space, as published
    ("well known", "well-known", False, 0.0),
    ("theatre", "atre", False, 0.0),  # only whole words are articles
    ("an apple and the pear", "apple and pear", True, 1.0),
    # 1 common word of 3 and of 1: p = 1/3, r = 1
    ("in Paris, France", "Paris", False, 0.5),
    # 2 common of 3 and of 4: 2 * 2 / 7
    ("King Charles III", "King Charles of Spain", False, 4 / 7),
    # a word counts as often as it occurs in both: 1 common of 3 and of 1
    ("no no no", "no", False, 0.5),
    ("no no", "no no no", False, 0.8),
    ("yes", "yes", True, 1.0),
    ("Yes.", "yes", True, 1.0),
    ("yes", "no", False, 0.0),
    # as published: one of three words
    ("yes it is", "yes", False, 0.5),
    ("not yes but no", "no", False, 0.4),
    ("1,200", "1200", True, 1.0),
    ("$5", "5", True, 1.0),
    ("3.5", "35", True, 1.0),  # a weakness of the published rule
    ("10th and 11th centuries", "in the 10th and 11th centuries", False, 8 / 9),
    # only ASCII punctuation is removed, and accents count
    ("Satanás", "satanás", True, 1.0),
    ("Satanas", "Satanás", False, 0.0),
    ("ÉCOLE", "école", True, 1.0),
    ("“Ulysses”", "Ulysses", False, 0.0),
    ("東京", "東京", True, 1.0),
    ("東京 都", "東京", False, 2 / 3),
    ("a\u00a0b", "b", True, 1.0),
    # nothing is left of these, so they are compared as they are
    ("The", "the", True, 1.0),
    ("The", "A", False, 0.0),
    ("?!", "?!", True, 1.0),
    ("?!", "a", False, 0.0),
    ("", "", True, 1.0),
    ("", "a", False, 0.0),
    ("", "Paris", False, 0.0),
    ("Paris", "", False, 0.0),
]


@pytest.mark.parametrize(("answer", "accepted", "exact", "f1"), COMPARED)
def test_two_texts_are_compared(answer: str, accepted: str, exact: bool, f1: float) -> None:
    assert is_exact_match(answer, accepted) is exact and is_exact_match(accepted, answer) is exact
    assert compute_f1(answer, accepted) == pytest.approx(f1, abs=1e-12)
    assert compute_f1(accepted, answer) == pytest.approx(f1, abs=1e-12)


def published_normalise(s: str) -> str:
    """The four steps of the evaluation script of SQuAD, in its order."""
    s = "".join(c for c in s.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", s).split())


def published_f1(prediction: str, truth: str) -> float:
    """F1 as the script of SQuAD 2.0 computes it."""
    said, gold = published_normalise(prediction).split(), published_normalise(truth).split()
    if not said or not gold:
        return float(said == gold)
    num_same = sum((Counter(said) & Counter(gold)).values())
    if num_same == 0:
        return 0.0
    precision, recall = num_same / len(said), num_same / len(gold)
    return 2 * precision * recall / (precision + recall)


WORDS = st.lists(st.sampled_from(["a", "The", "an", "cat", "Cat.", "dog", "é", "1,2", "yes", "--", "東京"]), max_size=8)


@given(WORDS.map(" ".join), WORDS.map(" ".join))
def test_the_numbers_are_those_of_the_published_formula(answer: str, accepted: str) -> None:
    assert normalise(answer) == published_normalise(answer)
    if published_normalise(answer) or published_normalise(accepted):
        assert compute_f1(answer, accepted) == pytest.approx(published_f1(answer, accepted), abs=1e-12)
        assert is_exact_match(answer, accepted) == (published_normalise(answer) == published_normalise(accepted))


@given(st.text(max_size=60))
def test_any_text_is_normalised_as_published(text: str) -> None:
    assert normalise(text) == published_normalise(text)
    assert is_exact_match(text, text) and compute_f1(text, text) == 1


# completion, right, tagged, alone, part of the reason
FOUND = [
    ("<answer>Paris</answer>", True, True, True, ""),
    ("  <answer> the Paris. </answer>\n", True, True, True, ""),
    ("It is <answer>Paris</answer>", True, True, False, ""),
    ("<think>Rome?</think><answer>Paris</answer>", True, True, True, ""),
    ("Rome?</think>\n<answer>Paris</answer>", True, True, True, ""),
    ("<think><answer>Rome</answer></think><answer>Paris</answer>", True, False, False, ""),
    ("<answer>Rome</answer> No, <answer>Paris</answer>", True, False, False, ""),
    ("<answer>Paris</answer> No, <answer>Rome</answer>", False, False, False, "another answer"),
    ("<answer>Lutetia</answer>", True, True, True, ""),
    ("<answer>in Paris</answer>", False, True, True, "F1 is 0.67"),
    ("<answer>Rome</answer>", False, True, True, "another answer"),
    ("Paris", False, False, False, "no answer tag"),
    ("\\boxed{Paris}", False, False, False, "no answer tag"),
    ("<answer>Paris", False, False, False, "no closed answer tag"),
    ("Paris</answer>", False, False, False, "no closed answer tag"),
    ("<answer></answer>", False, False, False, "empty"),
    ("<answer> ? </answer>", False, False, False, "empty"),
    ("<think><answer>Paris</answer>", False, False, False, "thoughts do not end"),
    ("<ANSWER>Paris</ANSWER>", False, False, False, "no answer tag"),
    ("", False, False, False, "no answer tag"),
    ("<answer>" + "Paris " * 1000 + "</answer>", False, True, True, "longer than"),
]


@pytest.mark.parametrize(("text", "right", "tagged", "alone", "reason"), FOUND)
def test_the_answer_is_found(text: str, right: bool, tagged: bool, alone: bool, reason: str) -> None:
    graded = grade_answer(text, ["Paris", "Lutetia"])
    assert (graded.is_right, graded.is_tagged, graded.is_alone) == (right, tagged, alone)
    assert reason in graded.reason and bool(graded.reason) == (not right)
    assert graded.f1 == 1.0 if right else graded.f1 < 1


def test_the_best_of_several_accepted_answers_counts() -> None:
    graded = grade_answer("<answer>King Charles</answer>", ["Charles", "King Charles III", "Louis"])
    # 2 common words of 2 and 3, better than 1 of 2 and 1.
    assert graded.f1 == pytest.approx(0.8, abs=1e-12) and not graded.is_right
    assert grade_answer("<answer>x</answer>", []).f1 == 0


@pytest.mark.parametrize(
    "text",
    [
        "<answer>" * 200_000,
        "</answer>" * 200_000,
        "<answer>a</answer>" * 100_000,
        "<think>" * 200_000 + "<answer>x</answer>",
        "<answer>" + "a " * 500_000 + "</answer>",
        "<answer>" + "\0" * 1_000_000 + "</answer>",
    ],
    ids=["opened", "closed", "many", "thoughts", "long", "null"],
)
def test_hostile_answers_are_wrong_at_once(text: str) -> None:
    start = time.process_time()
    assert not grade_answer(text, ["Paris"] * 5).is_right
    assert time.process_time() - start < 2


def test_an_answer_of_the_greatest_length_is_compared() -> None:
    longest = "x" * MAX_CHARS
    assert grade_answer(f"<answer>{longest}</answer>", [longest]).is_right
    assert not grade_answer(f"<answer>{longest}x</answer>", [f"{longest}x"]).is_right
