"""Rejection sampling: the answers of an evaluation that a grader accepted, as conversations to imitate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from cohort.evaluation.records import EvalAnswer, EvalItem, Evaluation
from cohort.rollout.episode import join_messages
from cohort.text.plain import add_system

Keep = Literal["correct", "wrong", "all"] | float
"""Which answers: right ones, wrong ones, all that have a score, or those with at least this accuracy or reward."""


@dataclass(kw_only=True, slots=True)
class SelectedAnswers:
    """Conversations made of answers, and how many answers were left out, by the reason."""

    rows: list[dict[str, Any]] = field(default_factory=list)  # {"id": problem, "messages": [...]}
    num_problems: int = 0  # that have at least one
    num_cut: int = 0  # answers that were cut off: their end would teach to stop there
    num_other: int = 0  # answers of another verdict, or without one
    num_repeated: int = 0  # equal answers of a problem, and those beyond the limit

    def describe(self) -> str:
        """Returns the numbers as text."""
        parts = [
            f"problems: {self.num_problems}",
            f"left out: other verdicts {self.num_other}, cut off {self.num_cut}, repeated or too many "
            f"{self.num_repeated}",
        ]
        return ", ".join(parts)


def select_answers(evaluation: Evaluation, keep: Keep, per_problem: int) -> SelectedAnswers:
    """Returns the answers of an evaluation that `keep` names, as conversations, in the order of the problems.

    Each has at most `per_problem` different answers of a problem; 0 = all. The system prompt of the evaluation is part
    of its conversations. An answer that continues a message of the prompt is joined with it.
    """
    chosen = SelectedAnswers()
    for item in evaluation.items:
        seen: set[str] = set()
        for answer in item.answers:
            if not _has_verdict(answer, keep):
                chosen.num_other += 1
            elif answer.finish != "stop":
                chosen.num_cut += 1
            elif answer.text in seen or (per_problem and len(seen) >= per_problem):
                chosen.num_repeated += 1
            else:
                seen.add(answer.text)
                row = {"id": item.id, "messages": _make_messages(item, answer, evaluation.setting.system)}
                chosen.rows.append(row | ({"tools": item.tools} if item.tools else {}))
        chosen.num_problems += bool(seen)
    return chosen


def _has_verdict(answer: EvalAnswer, keep: Keep) -> bool:
    """Returns whether the verdict on an answer is one that `keep` names. One that could not be scored has none.

    `keep` is "all" or the least reward where the task has no accuracy.
    """
    if answer.value is None:
        return False
    if isinstance(keep, float):
        return answer.value >= keep
    return keep == "all" or (answer.correct == 1.0) == (keep == "correct")


def _make_messages(item: EvalItem, answer: EvalAnswer, system: str) -> list[dict[str, Any]]:
    """Returns the prompt of a problem and an answer to it, as messages. An answer may be a whole conversation."""
    messages = [*add_system(item.messages, system)]
    if answer.messages:
        return join_messages(messages, answer.messages)
    begun = ""
    # The prompt may begin the assistant's message, which the answer continues.
    if messages and messages[-1]["role"] == "assistant":
        begun = str(messages.pop()["content"])
    return [*messages, {"role": "assistant", "content": begun + answer.text}]
