"""The task arithmetic: its rows, splits, prompts and settings."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import islice

import pytest

from cohort.errors import TaskError
from cohort.tasks.arithmetic import PHRASINGS, Arithmetic
from cohort.tasks.base import load_rows
from cohort.tasks.expression import evaluate
from cohort.tasks.self_check import run_self_check
from cohort.tasks.splits import SPLITS, assign_split

SMALL = Arithmetic(train_size=400, test_size=100)
SETTINGS = {
    "default": SMALL,
    "large": Arithmetic(
        max_terms=6,
        max_digits=6,
        parentheses=True,
        negatives=True,
        spaces=True,
        keep=(10, 10**8),
        train_size=300,
        test_size=100,
    ),
    "digits": Arithmetic(max_terms=2, max_digits=1, train_size=40, test_size=10),
    "signs": Arithmetic(min_terms=3, negatives=True, parentheses=True, train_size=300, test_size=100),
    "huge": Arithmetic(
        min_terms=12, max_terms=12, min_digits=9, max_digits=9, keep=(0, 0), train_size=20, test_size=20
    ),
}


def numbers_of(expression: str) -> tuple[int, ...]:
    return tuple(sorted(int(n) for n in evaluate(expression).numbers))


@pytest.mark.parametrize("task", SETTINGS.values(), ids=SETTINGS)
def test_a_gold_answer_scores_full_marks_and_an_empty_one_nothing(task: Arithmetic) -> None:
    assert run_self_check(task, 100).num_gold >= 20


@pytest.mark.parametrize("task", SETTINGS.values(), ids=SETTINGS)
def test_rows_are_what_they_say(task: Arithmetic) -> None:
    for row in load_rows(task, "train"):
        assert row["id"] == row["expression"].replace(" ", "")
        value = evaluate(row["expression"]).value
        assert value == row["answer"]
        assert any(row["question"] == phrasing.format(row["expression"]) for phrasing in PHRASINGS)
        terms = numbers_of(row["expression"])
        assert task.min_terms <= len(terms) <= task.max_terms
        assert all(task.min_digits <= len(str(n)) <= task.max_digits for n in terms)
        if task.keep != (0, 0):
            assert task.keep[0] <= abs(row["answer"]) <= task.keep[1]


def test_splits_share_no_numbers_whatever_the_settings() -> None:
    """Also with different settings: no trace of one recipe is a test row of another."""
    used: dict[str, set[tuple[int, ...]]] = {split: set() for split in SPLITS}
    for task in SETTINGS.values():
        for split in SPLITS:
            used[split] |= {numbers_of(row["expression"]) for row in task.rows(split)}
    assert all(len(found) > 500 for found in used.values() if found is not used["test"])
    for one, other in (("train", "test"), ("train", "traces"), ("test", "traces")):
        assert not used[one] & used[other]


def test_the_split_ignores_order_and_sign() -> None:
    assert assign_split([12, 7, 7]) == assign_split([7, -12, 7])
    counts = {split: sum(assign_split([a, b]) == split for a in range(60) for b in range(a)) for split in SPLITS}
    total = sum(counts.values())
    assert abs(counts["train"] / total - 0.5) < 0.05
    assert abs(counts["test"] / total - 0.2) < 0.05


def test_rows_are_the_same_every_time_and_a_larger_set_starts_with_the_smaller() -> None:
    rows = list(SMALL.rows("train"))
    assert rows == list(SMALL.rows("train"))
    assert rows == list(islice(replace(SMALL, train_size=900).rows("train"), 400))


def test_the_first_rows_never_change() -> None:
    """Published numbers were measured on them."""
    assert [row["question"] for row in islice(Arithmetic().rows("train"), 3)] == FIRST_TRAIN
    assert [row["question"] for row in islice(Arithmetic().rows("test"), 3)] == FIRST_TEST


FIRST_TRAIN = ["Find 1-48.", "Calculate 1*42+94.", "What is 8*6?"]
FIRST_TEST = ["Find 7+57-98.", "Compute 2+80+8.", "Find 7-61+5."]


def test_settings_show_in_the_rows() -> None:
    plain = [row["expression"] for row in SETTINGS["default"].rows("train")]
    assert not any(c in e for e in plain for c in "() ")
    assert {op for e in plain for op in "+-*" if op in e} == set("+-*")
    large = [row["expression"] for row in SETTINGS["large"].rows("train")]
    for sign in ("(", "-(", "--", " + ", "*"):
        assert any(sign in e for e in large), sign
    only_sums = Arithmetic(operators="+", train_size=50, test_size=5)
    assert all("-" not in row["id"] and "*" not in row["id"] for row in only_sums.rows("train"))


def test_prompts_are_short_unless_asked() -> None:
    row = next(iter(SMALL.rows("train")))
    (message,) = SMALL.prompt(row)
    assert message == {"role": "user", "content": row["question"]}
    assert len(message["content"]) < 30
    assert "</answer>" in replace(SMALL, instructions=True).prompt(row)[0]["content"]


@pytest.mark.parametrize(
    "settings",
    [
        {"min_terms": 1},
        {"min_terms": 4},
        {"max_digits": 0},
        {"max_digits": 10},
        {"operators": "+/"},
        {"operators": ""},
        {"keep": (9, 3)},
        {"train_size": 0},
    ],
)
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(TaskError, match='task "arithmetic" has a setting that is not allowed: it needs'):
        Arithmetic(**settings)


def test_a_space_too_small_says_how_many_there_are() -> None:
    task = Arithmetic(max_terms=2, max_digits=1, operators="+", train_size=1000)
    with pytest.raises(TaskError, match=r"only \d+ train problems .* lower train_size"):
        list(task.rows("train"))
    with pytest.raises(TaskError, match='no split "valid"'):
        list(task.rows("valid"))


def test_value_is_a_fraction_equal_to_the_int() -> None:
    assert evaluate("6*7").value == Fraction(42)
