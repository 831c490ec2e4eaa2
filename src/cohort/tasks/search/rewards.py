"""What an answer to a search question earns: the parts of the reward for each value of the setting `reward`.

    correct   `correct` is 1 if the answer is right, `f1` is its F1, `format` is 1 for one answer tag. With the
              coefficients in COEFFICIENTS, which are for recipes, only a right answer is paid.
    seed      The sum of the parts is the reward of the re-grpo project, from -0.8 to 2.0, for a conversation of one
              call and one answer (SEED). It stops at the first failure: what comes after it counts nothing.

The parts are a function of what was called and what was answered. A call is judged by its status. The original looked
for the word "error" in the result, which punishes passages about errors, and took an unknown tool for a success.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cohort.tasks.search.grading import GradedAnswer

Reward = Literal["correct", "seed"]
CallStatus = Literal["none", "failed", "ok"]
"""What became of the calls of a conversation: there was none, one failed (or named no tool), or all gave a result."""

PARTS = ("correct", "f1", "format", "call", "result", "penalty")
# With these coefficients the reward is what its name says.
COEFFICIENTS: dict[Reward, Mapping[str, float]] = {"correct": {"f1": 0.0, "format": 0.0}, "seed": {}}


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedRule:
    """The numbers of the seed's reward, in the order in which they count: each for success and for failure."""

    call: tuple[float, float] = (0.2, -0.5)  # there is a call of a tool
    result: tuple[float, float] = (0.5, -1.0)  # it gave a result
    format: tuple[float, float] = (0.3, -0.8)  # the answer is an answer tag and nothing else
    answer: tuple[float, float] = (1.0, -0.5)  # the answer is right


SEED = SeedRule()


def judge_calls(outcomes: Sequence[str]) -> CallStatus:
    """Returns what became of the calls of a conversation, given the outcome of each: "ok", or why it failed.

    >>> judge_calls([]), judge_calls(["ok", "ok"]), judge_calls(["ok", "unknown"])
    ('none', 'ok', 'failed')
    """
    if not outcomes:
        return "none"
    return "ok" if all(outcome == "ok" for outcome in outcomes) else "failed"


def compute_parts(reward: Reward, graded: GradedAnswer, call: CallStatus = "none") -> dict[str, float]:
    """Returns the parts of the reward for a graded answer and the calls before it. Parts that are not used are 0."""
    parts = dict.fromkeys(PARTS, 0.0) | {"correct": float(graded.is_right)}
    if reward == "correct":
        return parts | {"f1": graded.f1, "format": float(graded.is_tagged)}
    return parts | compute_seed_parts(graded, call)


def compute_seed_parts(graded: GradedAnswer, call: CallStatus, rule: SeedRule = SEED) -> dict[str, float]:
    """Returns the parts call, result, format and penalty, which add up to the seed's reward with `correct`.

    `correct` is 1 for every right answer, because it is the accuracy. `penalty` is what the answer earns minus that.

    >>> right = GradedAnswer(is_right=True, f1=1.0, is_tagged=True, is_alone=True)
    >>> round(1 + sum(compute_seed_parts(right, "ok").values()), 9)
    2.0
    >>> compute_seed_parts(right, "none")
    {'call': -0.5, 'penalty': -1.0}
    """
    correct = float(graded.is_right)
    if call == "none":
        return {"call": rule.call[1], "penalty": -correct}
    if call == "failed":
        return {"call": rule.call[0], "result": rule.result[1], "penalty": -correct}
    parts = {"call": rule.call[0], "result": rule.result[0]}
    if not graded.is_alone:
        return parts | {"format": rule.format[1], "penalty": -correct}
    return parts | {"format": rule.format[0], "penalty": rule.answer[0 if graded.is_right else 1] - correct}
