"""Rewards that are not 0 or 1: no accuracy, bare numbers, and parts that do not apply to an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from cohort.errors import TaskError
from cohort.scoring.wire import Reply, check_environment_reply
from cohort.tasks.base import has_rows, load_rows, make_plain_answer, task
from cohort.tasks.grading import grade
from cohort.tasks.parts import NO_PART, check_parts, read_part_rules
from cohort.tasks.self_check import run_self_check

ROW = {"id": "r"}


def make_class(**body: Any) -> type:
    """Returns a class that can be a task, with these attributes."""

    def rows(self: Any, split: str) -> Iterator[dict]:
        yield from [{"id": "a"}, {"id": "b"}] if split == "train" else []

    methods = {"rows": rows, "prompt": lambda self, row: [], "score": lambda self, row, answer: 0.0}
    return type("Own", (), methods | body)


def make_task(**body: Any) -> Any:
    """Returns a task with these attributes. It is not registered."""
    cls = make_class(**body)
    rules = read_part_rules("own", cls)
    names = {"name": "own", "parts": rules.parts, "accuracy": rules.accuracy, "optional_parts": rules.optional}
    for name, value in names.items():
        setattr(cls, name, value)
    return cls()


@pytest.mark.parametrize(
    ("body", "parts", "accuracy"),
    [
        ({}, ("correct",), "correct"),
        ({"accuracy": None}, ("score",), None),
        ({"parts": ("style", "brief")}, ("style", "brief"), None),
        ({"parts": ["correct", "brief"]}, ("correct", "brief"), "correct"),
        ({"parts": ("correct", "brief"), "accuracy": None}, ("correct", "brief"), None),
        ({"accuracy": "exact"}, ("exact",), "exact"),
    ],
)
def test_a_class_says_by_parts_and_accuracy_what_it_scores(body: dict, parts: tuple, accuracy: str | None) -> None:
    rules = read_part_rules("own", make_class(**body))
    assert (rules.parts, rules.accuracy, rules.optional) == (parts, accuracy, False)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"parts": ()}, "needs one name or more"),
        ({"parts": ("a", "a")}, "none of them twice"),
        ({"parts": "score"}, "write the names in a tuple"),
        ({"parts": (1,)}, "write the names in a tuple"),
        ({"accuracy": 1}, "must be the name of a part, or None"),
        ({"parts": ("a",), "accuracy": "b"}, "or set accuracy = None in the class for a continuous reward"),
        ({"optional_parts": "yes"}, "optional_parts is 'yes'; it must be True or False"),
    ],
)
def test_declarations_that_make_no_sense_are_refused(body: dict, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        task("senseless")(make_class(**body))


@pytest.mark.parametrize(
    "number", [0.75, np.float32(0.75), np.float64(0.75), np.array(0.75), torch.tensor(0.75)], ids=lambda n: str(type(n))
)
def test_a_task_with_one_part_may_return_its_number(number: Any) -> None:
    found = grade(make_task(accuracy=None, score=lambda self, row, answer: number), ROW, make_plain_answer("x"))
    assert found.parts == {"score": 0.75} and type(found.parts["score"]) is float and not found.failure


@pytest.mark.parametrize("number", [True, 1, np.True_, np.int64(1)], ids=lambda n: str(type(n)))
def test_a_bare_number_may_be_the_accuracy(number: Any) -> None:
    assert check_parts("t", "r", ("correct",), "correct", number) == {"correct": 1.0}


def test_a_bare_number_of_several_parts_and_other_values_are_refused() -> None:
    with pytest.raises(TaskError, match=r"parts as a float; .* or a number if the task has one part"):
        check_parts("t", "r", ("a", "b"), None, 0.5)
    for wrong in (np.zeros(1), "1", [1.0], float("nan"), float("inf"), 1j):
        with pytest.raises(TaskError, match='task "t", row "r"'):
            check_parts("t", "r", ("a",), None, wrong)


def test_a_decimal_is_a_number_and_an_array_is_told_how_to_be_one() -> None:
    assert check_parts("t", "0", ("score",), None, Decimal("0.25")) == {"score": 0.25}
    assert check_parts("t", "0", ("a", "b"), None, {"a": Decimal(1), "b": 2}) == {"a": 1.0, "b": 2.0}
    for wrong in (Decimal("nan"), Decimal("sNaN"), Decimal("1e400")):
        with pytest.raises(TaskError, match="return a finite number"):
            check_parts("t", "0", ("score",), None, wrong)
    for scored in (np.array([0.5]), {"score": np.array([0.5])}):
        with pytest.raises(TaskError, match=r"an array of shape \(1,\) for part 'score'; return a number, as .*item"):
            check_parts("t", "0", ("score",), None, scored)


@pytest.mark.parametrize("number", [1e300, -1e300, 10**15, 1.01e12])
def test_a_number_that_no_update_could_use_is_refused_with_the_limit(number: float) -> None:
    with pytest.raises(TaskError, match=r"row \"0\": .* for 'score'; return a number between -1e\+12 and 1e\+12"):
        check_parts("t", "0", ("score",), None, number)
    assert check_parts("t", "0", ("score",), None, -1e12) == {"score": -1e12}
    with pytest.raises(TaskError, match=r"as cost; .* between -1e\+12 and 1e\+12"):
        check_environment_reply("t", "0", Reply(number=0, cost=float(number)))


def test_a_continuous_value_for_the_accuracy_is_told_both_remedies_in_one_line() -> None:
    with pytest.raises(TaskError, match=r"set accuracy = None in the class .* or add a part") as caught:
        check_parts("t", "r", ("correct",), "correct", 0.7)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scored", [{"a": 2.0}, {"a": 2.0, "b": None}])
def test_a_part_that_does_not_apply_is_absent_where_the_task_allows_it(scored: dict) -> None:
    assert check_parts("t", "r", ("a", "b"), None, scored, optional=True) == {"a": 2.0}
    with pytest.raises(TaskError, match=r"'b'.* set optional_parts = True in the class"):
        check_parts("t", "r", ("a", "b"), None, scored)


def test_the_accuracy_applies_to_every_answer() -> None:
    for scored in ({"b": 1.0}, {"correct": None, "b": 1.0}):
        with pytest.raises(TaskError, match="'correct', the accuracy, which applies to every answer"):
            check_parts("t", "r", ("correct", "b"), "correct", scored, optional=True)


def test_an_undeclared_part_is_refused_even_if_parts_are_optional() -> None:
    with pytest.raises(TaskError, match="returned the part 'c'"):
        check_parts("t", "r", ("a", "b"), None, {"c": 1.0}, optional=True)


@pytest.mark.parametrize("scored", [None, {}, {"score": None}])
def test_an_answer_to_which_no_part_applies_has_failed_and_has_no_reward(scored: Any) -> None:
    own = make_task(accuracy=None, optional_parts=True, score=lambda self, row, answer: scored)
    found = grade(own, ROW, make_plain_answer("x"))
    assert (found.parts, found.failure) == ({}, NO_PART)


def test_a_forgotten_return_is_an_error_unless_the_only_part_is_optional() -> None:
    for body in ({"accuracy": None}, {"parts": ("a", "b"), "optional_parts": True}):
        with pytest.raises(TaskError, match="returned None"):
            grade(make_task(score=lambda self, row, answer: None, **body), ROW, make_plain_answer("x"))


def test_a_split_may_be_empty_only_if_the_caller_says_so() -> None:
    own = make_task(accuracy=None)
    assert has_rows(own, "train") and not has_rows(own, "test")
    assert load_rows(own, "test", may_be_empty=True) == []
    with pytest.raises(TaskError, match=r"so there is nothing to evaluate; --split validation .* cuts some"):
        load_rows(own, "test")


def test_the_self_check_of_a_continuous_reward_only_scores() -> None:
    gold = {"gold": lambda self, row: "x", "score": lambda self, row, answer: 1.0 + len(answer.text)}
    assert run_self_check(make_task(accuracy=None, **gold)).num_rows == 2
    with pytest.raises(TaskError, match="return a number"):
        run_self_check(make_task(accuracy=None, score=lambda self, row, answer: {"score": "much"}))


def test_what_a_worker_says_of_its_task_survives_the_wire() -> None:
    from cohort.scoring.wire import Ready, Reply

    for ready in (Ready(("score",), None, 0.0, True), Ready(("correct", "b"), "correct", 2.5)):
        assert Reply.decode(Reply(ready=ready).encode()).ready == ready
    with pytest.raises(ValueError, match="ready is not"):
        Reply.decode(json.dumps({"ready": [["a"], 1, 0.0, True]}).encode())
    scored = Reply(number=1, parts={})
    assert scored.to_outcome({}).failure == NO_PART and not scored.to_outcome({"a": 1.0}).failure
    assert not replace(scored, replies=[{"role": "user", "content": "go on"}]).to_outcome({}).failure
