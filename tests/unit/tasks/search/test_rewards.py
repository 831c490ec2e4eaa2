"""The rewards of the task search_qa, with the sums of the original project worked out by hand."""

from __future__ import annotations

import pytest

from cohort.tasks.environment import compute_total_reward
from cohort.tasks.search.grading import GradedAnswer, grade_answer
from cohort.tasks.search.rewards import COEFFICIENTS, PARTS, CallStatus, compute_parts

RIGHT, WRONG, WORDY, NONE = "<answer>Paris</answer>", "<answer>Rome</answer>", "It is <answer>Paris</answer>", "Paris"
# calls, answer, sum of the parts
SEED: list[tuple[CallStatus, str, float]] = [
    ("none", RIGHT, -0.5),
    ("none", NONE, -0.5),
    ("failed", RIGHT, 0.2 - 1.0),
    ("failed", WRONG, 0.2 - 1.0),
    ("ok", RIGHT, 0.2 + 0.5 + 0.3 + 1.0),
    ("ok", WRONG, 0.2 + 0.5 + 0.3 - 0.5),
    # The original compares only an answer that stands alone.
    ("ok", WORDY, 0.2 + 0.5 - 0.8),
    ("ok", NONE, 0.2 + 0.5 - 0.8),
]


def grade(text: str) -> GradedAnswer:
    return grade_answer(text, ["Paris"])


@pytest.mark.parametrize(("call", "text", "total"), SEED)
def test_the_seed_pays_what_the_original_paid(call: CallStatus, text: str, total: float) -> None:
    parts = compute_parts("seed", grade(text), call)
    assert tuple(parts) == PARTS
    assert compute_total_reward(parts, COEFFICIENTS["seed"]) == pytest.approx(total, abs=1e-12)
    # The accuracy does not depend on what is paid.
    assert parts["correct"] == grade(text).is_right


def test_plain_pays_a_right_answer_alone() -> None:
    for text, worth, f1, format in ((RIGHT, 1, 1, 1), (WORDY, 1, 1, 1), (WRONG, 0, 0, 1), (NONE, 0, 0, 0)):
        parts = compute_parts("correct", grade(text), "ok")
        assert (parts["correct"], parts["f1"], parts["format"]) == (worth, f1, format)
        assert compute_total_reward(parts, COEFFICIENTS["correct"]) == worth
        assert parts["call"] == parts["result"] == parts["penalty"] == 0


def test_a_result_that_speaks_of_errors_is_no_failure() -> None:
    """The status of a call decides, never a word in its result; an answer may speak of errors too."""
    graded = grade_answer("<answer>Error</answer>", ["error"])
    assert compute_total_reward(compute_parts("seed", graded, "ok"), {}) == pytest.approx(2.0, abs=1e-12)
