"""Evaluation: what is sampled, what is counted, and that failures are left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cohort.errors import TrainingStopped
from cohort.evaluation.evaluate import evaluate
from cohort.evaluation.statistics import accuracy_interval
from cohort.types import Outcome, Sampling
from tests.helpers.evaluations import eval_item, eval_setting
from tests.unit.rollout.test_rollout import STOP, producer, prompt


def run_evaluation(
    grade, num_prompts: int, num_samples: int, accuracy: str = "correct", known=None, done=None, **changes
):
    """Evaluates `num_prompts` prompts with a grader in this process, and returns the evaluation."""
    named = SimpleNamespace(task=SimpleNamespace(name="t", accuracy=accuracy, parts=(accuracy, "style")))
    made = producer(grade, stream=named, purpose="eval", group_size=num_samples, **changes)
    prompts = [prompt(n) for n in range(num_prompts)]
    setting = eval_setting(task="t", num_problems=num_prompts, num_samples=num_samples, step=7)
    return evaluate(made, prompts, setting, lambda p: f"ids {p.tokens}", known, done or (lambda item: None))


def get_sample_index(answer) -> int:
    return int(answer.text.split(".")[1]) - 100


def test_accuracy_is_the_mean_over_problems_of_the_accuracy_part():
    def grade(row, answer) -> Outcome:
        right = float(get_sample_index(answer) <= row["n"])
        return Outcome(parts={"correct": right, "style": 5.0}, reason="because")

    found = run_evaluation(grade, 3, 4)  # 1, 2 and 3 of 4 right
    assert found.accuracy == pytest.approx((0.25 + 0.5 + 0.75) / 3, abs=1e-12)
    assert (found.low, found.high) == accuracy_interval([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
    assert (found.step, found.setting.num_problems) == (7, 3) and found.parts["style"] == 5.0
    assert [p.k for p in found.passes] == [2, 4]
    assert found.num_failed == 0 and found.finishes == {"stop": 12}
    lengths = [3 + ((n + 10) * 7 + i * 3) % 11 for n in range(3) for i in range(4)]
    assert found.mean_tokens == pytest.approx(sum(lengths) / 12, abs=1e-12)
    item = found.items[1]
    assert (item.id, item.prompt, item.scores) == ("p1", "ids [11, 1]", [1.0, 1.0, 0.0, 0.0])
    assert item.messages == [{"role": "user", "content": "number 1"}]
    assert item.answers[0].text.startswith("11.100.") and {a.reason for a in item.answers} == {"because"}
    assert [a.num_tokens for a in item.answers] == lengths[4:8]


def test_a_task_may_name_another_part_as_its_accuracy():
    parts = {"correct": 0.0, "solved": 1.0}
    found = run_evaluation(lambda row, answer: Outcome(parts=parts), 2, 1, accuracy="solved")
    assert found.accuracy == 1.0 and found.items[0].scores == [1.0]


def test_a_sample_that_could_not_be_scored_is_left_out_not_wrong():
    def grade(row, answer) -> Outcome:
        if row["n"] == 0 and get_sample_index(answer) == 0:
            return Outcome(failure="worker died")
        return Outcome(parts={"correct": float(row["n"] == 0)})

    found = run_evaluation(grade, 10, 2)
    assert found.num_failed == 1
    assert found.accuracy == pytest.approx(0.1, abs=1e-12)  # problem 0: one right of one scored
    assert found.items[0].scores == [1.0] and [a.failure for a in found.items[0].answers] == ["worker died", ""]
    assert found.low == accuracy_interval([[1.0]] + [[0.0, 0.0]] * 9)[0]


def test_a_problem_with_no_scored_sample_is_left_out():
    found = run_evaluation(
        lambda row, a: Outcome(failure="died") if not row["n"] else Outcome(parts={"correct": 1.0}), 20, 1
    )
    assert found.accuracy == 1.0 and found.num_failed == 1 and len(found.items) == 20
    assert found.items[0].scores == []
    assert found.low == accuracy_interval([[1.0]] * 19)[0]


def test_many_failures_stop_an_evaluation_too():
    with pytest.raises(
        TrainingStopped, match=r"\d of 4 samples could not be scored, and at most 5% may fail.* then evaluate again"
    ):
        run_evaluation(
            lambda row, a: Outcome(failure="died") if not row["n"] else Outcome(parts={"correct": 1.0}), 2, 2
        )


def test_finishes_are_counted_by_reason():
    sampling = Sampling(max_tokens=6, stop_ids=(STOP,))
    found = run_evaluation(lambda row, answer: Outcome(parts={"correct": 0.0}), 4, 3, sampling=sampling)
    longer = sum(3 + ((n + 10) * 7 + i * 3) % 11 > 6 for n in range(4) for i in range(3))
    assert found.finishes == {"stop": 12 - longer, "length": longer} and 0 < longer < 12


def test_new_items_are_reported_as_they_are_complete_and_known_ones_are_not_sampled_again():
    reported = []
    known = {"p1": eval_item("p1", [0.0, 0.0])}
    found = run_evaluation(lambda row, answer: Outcome(parts={"correct": 1.0}), 3, 2, known=known, done=reported.append)
    assert sorted(item.id for item in reported) == ["p0", "p2"]
    assert [item.id for item in found.items] == ["p0", "p1", "p2"] and found.items[1] is known["p1"]
    assert found.accuracy == pytest.approx(2 / 3, abs=1e-12)


def test_a_task_may_count_something_of_its_own():
    class Counting(SimpleNamespace):
        def summary(self, rows, parts):
            return {"numbers": float(sum(r["n"] for r in rows)), "right": sum(p["correct"] for p in parts)}

    stream = SimpleNamespace(task=Counting(name="t", accuracy="correct", parts=("correct",)))
    made = producer(lambda row, a: Outcome(parts={"correct": float(row["n"] == 2)}), stream=stream, purpose="eval")
    setting = eval_setting(num_problems=3, num_samples=2)
    found = evaluate(made, [prompt(n) for n in range(3)], setting, lambda p: "")
    assert found.summary == {"numbers": 6.0, "right": 2.0}
