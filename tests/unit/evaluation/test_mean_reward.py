"""Evaluations of a task without an accuracy: the mean reward with its interval, in every place that shows one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest

from cohort.cli.compare import format_comparison
from cohort.cli.eval import format_evaluation
from cohort.errors import ConfigError, RunError
from cohort.evaluation.coefficients import list_coefficients, read_coefficients
from cohort.evaluation.compare import compare
from cohort.evaluation.evaluate import summarise
from cohort.evaluation.records import EvalAnswer, EvalItem, Evaluation
from cohort.evaluation.rejection import select_answers
from cohort.evaluation.statistics import compare_paired, mean, mean_interval
from cohort.logs.plain import PlainView
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

    found = run_evaluation(grade, 5, 2, accuracy=None, coefficients={"brief": 0.5})
    # Rewards are n + 0.5 i - 1 for problem n and sample i.
    assert found.items[2].scores == [1.0, 1.5] and found.items[2].answers[0].correct is None
    assert (found.accuracy, found.measure, found.value) == (None, "reward", pytest.approx(1.25, abs=1e-12))
    assert (found.low, found.high) == mean_interval([[n - 1.0, n - 0.5] for n in range(5)])
    assert found.passes == [] and found.parts == {"score": 2.25, "brief": -2.0}
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


def test_the_interval_is_students_over_problems_and_needs_five_of_them():
    low, high = mean_interval([[1.0, 3.0], [3.0], [4.0], [5.0], [6.0], []]) or (math.nan, math.nan)
    # The means 2 to 6 have the standard error sqrt(2.5 / 5); 2.776445 is the quantile for four degrees of freedom.
    half = 2.776445 * 0.5**0.5
    assert (low, high) == (pytest.approx(4 - half, abs=1e-5), pytest.approx(4 + half, abs=1e-5))
    assert mean_interval([[0.0], [1.0], [0.0], [1.0], []]) is None
    found = reward_evaluation({"a": [0.0], "b": [1.0]})
    said = "no interval: fewer than 5 problems"
    assert f"0.500, {said}" in format_evaluation(found) and "eval/reward_low" not in found.metrics


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


def test_tasks_of_a_mixture_have_their_own_rewards_and_the_line_says_what_is_measured() -> None:
    mixture = SimpleNamespace(
        name="mix",
        accuracy=None,
        for_row=lambda row: (None, row),
        get_label=lambda row: row["task"],
        summary=lambda rows, parts: {"accuracy/sums": 0.5, "problems/sums": 2.0, "problems/essay": 1.0},
    )
    rewards = {"a": [1.0, 0.0], "b": [0.25], "c": [-2.0]}
    rows = [{"id": "a", "task": "sums"}, {"id": "b", "task": "essay"}, {"id": "c", "task": "sums"}]
    items = reward_evaluation(rewards).items
    found = summarise(eval_setting(task="mix", num_problems=3), items, mixture, rows)  # type: ignore[arg-type]
    assert {name: found.summary[name] for name in ("reward/sums", "reward/essay")} == {
        "reward/sums": -0.75,
        "reward/essay": 0.25,
    }
    assert found.metrics["eval/reward/essay"] == 0.25 and found.metrics["eval/accuracy/sums"] == 0.5
    assert found.list_own_values() == [("sums", "accuracy", 0.5), ("essay", "reward", 0.25)]
    same = replace(found, accuracy=0.4, reward=None, summary={"accuracy/sums": 0.5, "accuracy/words": 0.3})
    shown = StringIO()
    for each in (found, same):
        PlainView(shown).show_evaluation(each)
    lines = shown.getvalue().splitlines()
    assert lines[0].endswith("3 problems: sums accuracy 0.500, essay reward 0.250")
    assert lines[1].endswith("3 problems: sums 0.500, words 0.300")
    single = SimpleNamespace(name="own", accuracy=None)
    assert summarise(eval_setting(num_problems=3), items, single, rows).summary == {}  # type: ignore[arg-type]
