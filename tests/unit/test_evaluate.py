"""Evaluation: intervals worked out by hand, pass@k by enumeration, failures left out."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import pytest

from cohort.engines.scripted import ScriptedEngine
from cohort.errors import TrainingStopped
from cohort.evaluate import evaluate, interval, pass_at_k
from cohort.types import Outcome, Sampling
from tests.runs import Grader
from tests.unit.test_rollout import STOP, prompt, says, spell, tasks


def run(grade, num_prompts: int, num_samples: int, accuracy: str = "correct", **changes):
    named = SimpleNamespace(task=SimpleNamespace(name="t", accuracy=accuracy))
    made = tasks(scorer=Grader(grade), stream=named, purpose="eval", **changes)
    return evaluate(ScriptedEngine(says, spell), made, [prompt(n) for n in range(num_prompts)], num_samples, 7, "test")


def index_of(answer) -> int:
    return int(answer.text.split(".")[1]) - 100


def test_wilson_interval_by_hand():
    # 3 of 4, z = 1.96: centre (0.75 + 0.4802) / (1 + 0.9604) = 0.62752; half = 1.96 sqrt(0.046875 + 0.060025) / 1.9604
    low, high = interval([[1.0], [1.0], [0.0], [1.0]])
    assert (low, high) == pytest.approx((0.30064, 0.95441), abs=2e-5)


def test_interval_of_several_samples_is_over_problems():
    # means 1, 0.5, 0, 0.5: mean 0.5, sum of squares 0.5, variance 0.5 / 3, standard error sqrt(1 / 24)
    rows = [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    half = 1.959963984540054 * math.sqrt(0.5 / 3 / 4)
    assert interval(rows) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-12)
    assert interval([[1.0] * 9, [0.0]]) == (0.0, 1.0)  # 0.5 +- 0.98, kept inside; each problem counts once


def test_interval_at_the_ends_says_how_little_few_problems_tell():
    low, high = interval([[1.0]] * 5)
    assert high == 1.0 and low == pytest.approx(5 / (5 + 3.8414588), abs=1e-6)
    assert interval([[1.0, 1.0]] * 5) == (low, high)  # no spread between problems is not certainty
    assert interval([[0.0]] * 5) == pytest.approx((0.0, 1 - low), abs=1e-12)
    assert interval([]) == (0.0, 1.0)


def test_interval_covers_the_truth_about_95_times_in_100():
    rng, hits, trials = random.Random(0), 0, 2000
    for _ in range(trials):
        low, high = interval([[float(rng.random() < 0.3)] for _ in range(40)])
        hits += low <= 0.3 <= high
    assert 0.93 < hits / trials < 0.97


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(k):
    rows = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0, 0]]
    shares = []
    for row in rows:
        subsets = list(itertools.combinations(row, k))
        shares.append(sum(any(s) for s in subsets) / len(subsets))
    assert pass_at_k([[float(x) for x in row] for row in rows], k) == pytest.approx(sum(shares) / 4, abs=1e-12)


def test_pass_at_k_leaves_out_problems_with_fewer_samples():
    assert pass_at_k([[1.0], [0.0, 0.0]], 2) == 0.0
    assert pass_at_k([[1.0]], 2) == 0.0
    assert pass_at_k([[1.0], [0.0, 1.0]], 1) == 0.75


def test_accuracy_is_the_mean_over_problems_of_the_accuracy_part():
    def grade(row, answer) -> Outcome:
        right = float(index_of(answer) <= row["n"])
        return Outcome(parts={"correct": right, "style": 5.0}, reason="because")

    found = run(grade, 3, 4)  # 1, 2 and 3 of 4 right
    assert found.accuracy == pytest.approx((0.25 + 0.5 + 0.75) / 3, abs=1e-12)
    assert (found.low, found.high) == interval([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
    assert (found.task, found.split, found.step, found.num_problems, found.num_samples) == ("t", "test", 7, 3, 4)
    assert found.num_failed == 0 and found.finishes == {"stop": 12}
    lengths = [3 + ((n + 10) * 7 + i * 3) % 11 for n in range(3) for i in range(4)]
    assert found.mean_tokens == pytest.approx(sum(lengths) / 12, abs=1e-12)
    item = found.items[1]
    assert (item.id, item.prompt, item.correct) == ("p1", "number 1", [1.0, 1.0, 0.0, 0.0])
    assert item.completions[0].startswith("11.100.") and item.reason == ["because"] * 4


def test_a_task_may_name_another_part_as_its_accuracy():
    parts = {"correct": 0.0, "solved": 1.0}
    found = run(lambda row, answer: Outcome(parts=parts), 2, 1, accuracy="solved")
    assert found.accuracy == 1.0 and found.items[0].correct == [1.0]


def test_a_sample_that_could_not_be_scored_is_left_out_not_wrong():
    def grade(row, answer) -> Outcome:
        if row["n"] == 0 and index_of(answer) == 0:
            return Outcome(failure="worker died")
        return Outcome(parts={"correct": float(row["n"] == 0)})

    found = run(grade, 10, 2)
    assert found.num_failed == 1
    assert found.accuracy == pytest.approx(0.1, abs=1e-12)  # problem 0: one right of one scored
    assert found.items[0].correct == [1.0] and len(found.items[0].completions) == 1 == len(found.items[0].reason)
    assert found.low == interval([[1.0]] + [[0.0, 0.0]] * 9)[0]


def test_a_problem_with_no_scored_sample_is_left_out():
    found = run(lambda row, a: Outcome(failure="died") if not row["n"] else Outcome(parts={"correct": 1.0}), 20, 1)
    assert found.accuracy == 1.0 and found.num_failed == 1 and found.num_problems == 20
    assert found.items[0].correct == []
    assert found.low == interval([[1.0]] * 19)[0]


def test_many_failures_stop_an_evaluation_too():
    with pytest.raises(TrainingStopped, match="2 of 4 samples"):
        run(lambda row, a: Outcome(failure="died") if not row["n"] else Outcome(parts={"correct": 1.0}), 2, 2)


def test_finishes_are_counted_by_reason():
    sampling = Sampling(max_tokens=6, stop_ids=(STOP,))
    found = run(lambda row, answer: Outcome(parts={"correct": 0.0}), 4, 3, sampling=sampling)
    longer = sum(3 + ((n + 10) * 7 + i * 3) % 11 > 6 for n in range(4) for i in range(3))
    assert found.finishes == {"stop": 12 - longer, "length": longer} and 0 < longer < 12
