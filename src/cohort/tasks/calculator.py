"""The task calculator: the problems of arithmetic, with a tool that computes an expression.

The tool is the safe parser of this package: nothing is evaluated as Python. The result of a call is not an answer yet:
the model must give it in its last message.

Parts: `correct` and `format` are those of arithmetic, for the last message. `called` is whether a tool was called,
`ran` whether all calls were answered without an error. With `reward = "seed"` the part `steps` is the reward of the
project re-grpo, from -0.8 to 2: no call is -0.5; a call is 0.2, and a call that failed takes 1 and ends it there; calls
that succeeded add 0.5, an answer tag alone 0.3 (anything else takes 0.8), the right value 1 (a wrong one takes 0.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from cohort.tasks.answers import find_answer
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import Verdict, require, task
from cohort.tasks.expression import evaluate
from cohort.types import Answer, Message, Row

INSTRUCTIONS = (
    "Compute the value with the calculator, then write the number between <answer> and </answer> in a message of its "
    "own."
)


@task("calculator")
@dataclass(frozen=True, kw_only=True)
class Calculator(Arithmetic):
    """Expressions that a tool can compute: more terms and digits than a small model computes in its head."""

    min_terms: int = 2
    max_terms: int = 5
    max_digits: int = 3
    keep: tuple[int, int] = (0, 999_999)
    """Smallest and largest absolute value of answers that are kept; (0, 0) = all."""
    reward: str = "plain"
    """plain = the parts correct, format, called and ran; seed = correct, and steps whose sum is re-grpo's reward."""

    name: ClassVar[str]
    accuracy: ClassVar[str] = "correct"
    parts: ClassVar[tuple[str, ...]] = ("correct", "format", "called", "ran", "steps")
    tools: ClassVar[tuple[str, ...]] = ("calculator",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require("calculator", self.reward in ("plain", "seed"), f"reward plain or seed, not {self.reward!r}")

    def prompt(self, row: Row) -> list[Message]:
        """Returns one user message with the question, and with words about the tool if `instructions` is set."""
        return [{"role": "user", "content": row["question"] + (f" {INSTRUCTIONS}" if self.instructions else "")}]

    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression."""
        found = evaluate(expression)
        if found.value is None:
            raise ValueError(found.reason)
        return _write_number(found.value)

    def score(self, row: Row, answer: Answer) -> Verdict:
        """Returns the parts of the reward for the last message and the calls before it."""
        verdict = super().score(row, answer)
        called = float(bool(answer.calls))
        ran = float(bool(answer.calls) and all(outcome == "ok" for outcome in answer.calls))
        steps = _score_steps(answer, called, ran, verdict.parts["correct"]) if self.reward == "seed" else 0.0
        return Verdict({**verdict.parts, "called": called, "ran": ran, "steps": steps}, verdict.reason)


def _score_steps(answer: Answer, called: float, ran: float, correct: float) -> float:
    """Returns re-grpo's reward of a conversation. What a tool wrote does not matter, only how its calls ended."""
    if not called:
        return -0.5
    if not ran:
        return 0.2 - 1.0
    is_alone = find_answer(answer.text).well_formed and answer.text.strip().startswith("<answer>")
    is_alone = is_alone and answer.text.strip().endswith("</answer>")
    return 0.2 + 0.5 + (0.3 if is_alone else -0.8) + (1.0 if correct else -0.5)


def _write_number(value: Fraction) -> str:
    """Returns a fraction as a whole number if it is one, else as a fraction.

    >>> _write_number(Fraction(7, 1)), _write_number(Fraction(1, 3))
    ('7', '1/3')
    """
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"
