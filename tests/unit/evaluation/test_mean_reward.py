"""Evaluations of a task without an accuracy: the mean reward with its interval, in every place that shows one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cohort.cli.compare import format_comparison
from cohort.cli.eval import format_evaluation
from cohort.errors import ConfigError, RunError
from cohort.evaluation.coefficients import list_coefficients, read_coefficients
from cohort.evaluation.compare import compare
from cohort.evaluation.records import EvalAnswer, EvalItem, Evaluation
from cohort.evaluation.rejection import select_answers
from cohort.evaluation.statistics import compare_paired, mean, mean_interval
from cohort.tasks.parts import NO_PART
from cohort.types import Outcome
from tests.helpers.evaluations import eval_setting, evaluation
from tests.unit.evaluation.test_evaluate import get_sample_index, run_evaluation

OWN: Any = SimpleNamespace(name="own", accuracy=None, parts=("score", "brief"))


def reward_evaluation(rewards: dict[str, list[float]], **changes: Any) -> Evaluation:
    """Returns an evaluation by hand. `rewards` has the reward of each sample by problem id."""
    items = [
        EvalItem(
            id=id,
            messages=[{"role": "user", "content": f"question {id}"}],
            prompt=f"<user>question {id}",
            answers=[
                EvalAnswer(text=f"{id} {i}", finish="stop", num_tokens=5, correct=None, reward=r, parts={"score": r})
                for i, r in enumerate(row)
            ],
        )
        for id, row in rewards.items()
    ]
    low, high = mean_interval([item.scores for item in items]) or (None, None)
    return Evaluation(
        setting=eval_setting(**{"num_problems": len(items), "reward": {"score": 1.0}, **changes}),
        accuracy=None,
        reward=mean([mean(row) for row in rewards.values()]),
        low=low,
        high=high,
        finishes={"stop": len(items)},
        items=items,
    )


def test_the_mean_reward_takes_the_place_of_the_accuracy():
    def grade(row, answer) -> Outcome:
        return Outcome(parts={"score": row["n"] + 0.5 * get_sample_index(answer), "brief": -2.0})

    found = run_evaluation(grade, 3, 2, accuracy=None, coefficients={"brief": 0.5})
    # Rewards are n + 0.5 i - 1 for problem n and sample i.
    assert found.items[2].scores == [1.0, 1.5] and found.items[2].answers[0].correct is None
    assert (found.accuracy, found.measure, found.value) == (None, "reward", pytest.approx(0.25, abs=1e-12))
    assert (found.low, found.high) == mean_interval([[-1.0, -0.5], [0.0, 0.5], [1.0, 1.5]])
    assert found.passes == [] and found.parts == {"score": 1.25, "brief": -2.0}
    assert found.metrics["eval/reward"] == found.value and "eval/accuracy" not in found.metrics
    assert (found.metrics["eval/reward_low"], found.metrics["eval/reward_high"]) == (found.low, found.high)
    assert Evaluation.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_part_that_not_every_answer_has_is_averaged_over_those_that_have_it():
    def grade(row, answer) -> Outcome:
        if row["n"] == 0 and get_sample_index(answer) == 0:
            return Outcome(failure=NO_PART)
        return Outcome(parts={"score": 1.0} | ({"brief": 4.0} if get_sample_index(answer) == 1 else {}))

    found = run_evaluation(grade, 20, 2, accuracy=None)
    assert found.parts == {"score": 1.0, "brief": 4.0}
    # The answer to which no part applies is left out: its problem has the mean 5, the others (1 + 5) / 2.
    assert found.num_failed == 1 and found.items[0].scores == [5.0]
    assert found.value == pytest.approx((5 + 19 * 3) / 20, abs=1e-12)


def test_the_interval_is_students_over_problems_and_needs_two_of_them():
    low, high = mean_interval([[1.0, 3.0], [4.0], [6.0]]) or (math.nan, math.nan)
    # The means 2, 4, 6 have the standard error 2 / sqrt(3); 4.302653 is the quantile for two degrees of freedom.
    assert (low, high) == (pytest.approx(4 - 4.302653 * 2 / 3**0.5, abs=1e-5), pytest.approx(8.968, abs=1e-3))
    assert mean_interval([[1.0, 2.0], []]) is None
    found = reward_evaluation({"a": [0.5]})
    assert "0.500, no interval" in format_evaluation(found) and "eval/reward_low" not in found.metrics


def test_rewards_are_compared_without_the_bounds_of_shares():
    d = compare_paired([[0.0]] * 6, [[1.0], [9.0], [11.0], [10.0], [8.0], [12.0]], are_shares=False)
    assert d.mean == 8.5 and d.high > 1 and d.test == "sign flips" and d.verdict == 1
    # Rewards that happen to differ by 1 are no right and wrong answers.
    assert compare_paired([[0.0]], [[1.0]], are_shares=False).test == "sign flips"
    assert compare_paired([[0.0]], [[1.0]]).test == "exact McNemar"


def test_two_evaluations_are_compared_by_their_mean_rewards():
    a, b = reward_evaluation({"a": [0.5], "b": [-2.0]}), reward_evaluation({"a": [0.75], "b": [1.0]})
    found = compare(a, b)
    assert found.difference.mean == 1.625 and [p.id for p in found.won] == ["b", "a"] and found.lost == []
    text = format_comparison(found, 5)
    assert "reward" in text.splitlines()[0] and "accuracy" not in text and "-2.00 -> 1.00" in text
    sides = json.loads(found.to_json())
    assert sides["second"]["reward"] == 0.875 and "accuracy" not in sides["second"]


def test_rewards_with_other_coefficients_are_not_compared():
    one, two = ({"reward": {"score": x}} for x in (1.0, 2.0))
    with pytest.raises(RunError, match="different coefficients, score=1 and score=2"):
        compare(reward_evaluation({"a": [1.0]}, **one), reward_evaluation({"a": [1.0]}, **two))


def test_coefficients_are_read_as_part_and_number():
    assert read_coefficients(OWN, ("brief=0.5",)) == {"brief": 0.5}
    assert list_coefficients(OWN, {"brief": 0.5}) == {"score": 1.0, "brief": 0.5}
    for words, message in (
        (("brief",), "no coefficient. Write PART=NUMBER"),
        (("brief=nan",), "no coefficient"),
        (("breif=1",), 'Did you mean "brief"'),
    ):
        with pytest.raises(ConfigError, match=message):
            read_coefficients(OWN, words)
    exact: Any = SimpleNamespace(name="exact", accuracy="correct", parts=("correct",))
    assert list_coefficients(exact, {"correct": 2.0}) == {}
    with pytest.raises(ConfigError, match="has an accuracy, on which --reward has no effect"):
        read_coefficients(exact, ("correct=2",))


def test_answers_are_chosen_by_their_reward():
    found = reward_evaluation({"a": [0.2, 0.6], "b": [0.9]})
    texts = [row["messages"][-1]["content"] for row in select_answers(found, 0.5, 0).rows]
    assert texts == ["a 1", "b 0"]
    assert len(select_answers(found, "all", 0).rows) == 3


def test_an_evaluation_with_an_accuracy_is_stored_as_before_besides_the_new_fields():
    found = evaluation({"a": [1.0, None]})
    assert (found.measure, found.value, found.setting.reward) == ("accuracy", 1.0, {})
    old = found.to_json()
    # A file from before these fields existed is read as the same evaluation.
    del old["reward"], old["setting"]["reward"]
    for item in old["items"]:
        for answer in item["answers"]:
            del answer["reward"]
    assert Evaluation.from_json(old) == found
    assert replace(found.setting, reward={"a": 1.0}) != found.setting
