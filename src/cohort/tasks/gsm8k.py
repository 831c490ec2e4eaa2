"""GSM8K: grade-school word problems whose answer is one number (arXiv:2110.14168; 7,473 to train on, 1,319 to test).

An answer is right if the last marked number is exactly the reference's: `numbers` says how it is found and read.
`reward` chooses what a completion earns, the sum of its parts:

    plain   1 right, 0 wrong.
    verl    1 right, 0.1 wrong but in the marker that was asked for, 0 otherwise. verl's scorer as recipes set it; its
            own default pays nothing for the marker.
    tutor   1 right, -1 wrong; 0.2 more with the marker that was asked for, 0.2 less without it; 0.5 less for fewer than
            30 characters: from -1.7 to 1.2, as in the gsm8k-grpo project.

A marker counts for the format if there is a number in it. What the originals get wrong is not repeated: the first
`####` wins, so that an answer written before the reasoning is the one that counts; "1,200" is read as 1; signs and
decimals are lost; values are compared as strings, so that "18.00" is not 18; the format is paid again on top of a right
answer; the prompt's own text is searched for the answer; only the last 300 characters are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, ClassVar, Literal, get_args

from cohort.errors import TaskError
from cohort.tasks.base import Verdict, require, task
from cohort.tasks.numbers import Kind, Marked, find_marked, last_number, read_quantity
from cohort.tasks.source import Place, read_rows
from cohort.types import Answer, Message, Row

Style = Literal["boxed", "hashes", "tags", "tutor"]
Reward = Literal["plain", "verl", "tutor"]
Find = Literal["marked", "last"]

PLACES = {
    "train": Place(file="gsm8k_train.jsonl", hub="openai/gsm8k:main", split="train"),
    "test": Place(file="gsm8k_test.jsonl", hub="openai/gsm8k:main", split="test"),
}
ASKED: dict[Style, str] = {
    "boxed": "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    "hashes": '{question} Let\'s think step by step and output the final answer after "####".',
    "tags": "{question}\nThink between <think> and </think>, then write the number between <answer> and </answer>.",
    "tutor": "You are a math tutor. Reason concisely, then end with a line of #### and the number.\n\n{question}",
}
MARKER: dict[Style, Kind] = {"boxed": "boxed", "hashes": "hashes", "tags": "tags", "tutor": "hashes"}
SHORT = 30  # characters
_CALCULATOR = re.compile(r"<<[^<>]*>>")  # what the data set's own models were given: 9 * 2 = <<9*2=18>>18


@task("gsm8k")
class GSM8K:
    """Word problems with a number as their answer."""

    data: str = ""
    """Where the rows lie: a file (perhaps with {split} in its name) or a hub data set; "" = $COHORT_DATA or the hub."""
    columns: tuple[str, ...] = ()
    """Columns that are named otherwise there, as in question=problem."""
    test_size: int = 0
    """The first N test questions (500 = the subset of the gsm8k-grpo project); 0 = all 1,319."""
    style: Style = "boxed"
    """How the answer is asked for: in \\boxed{}, after ####, in answer tags, or of a tutor (after ####)."""
    reward: Reward = "plain"
    """What is paid: accuracy; 0.1 for the marker alone too; or accuracy, format and length with penalties."""
    find: Find = "marked"
    """Which number is the answer: the last marked one; last = where nothing is marked, the last of all."""

    name: ClassVar[str]
    accuracy: ClassVar[str] = "correct"
    parts: ClassVar[tuple[str, ...]] = ("correct", "penalty", "format", "length")
    max_tokens: ClassVar[int] = 1024  # of a completion, in evaluations that do not say

    def __post_init__(self) -> None:
        require("gsm8k", self.test_size >= 0, f"test_size of at least 0, not {self.test_size}")
        for knob, kind in {"style": Style, "reward": Reward, "find": Find}.items():
            known, given = get_args(kind), getattr(self, knob)
            require("gsm8k", given in known, f"{knob} among {', '.join(known)}, not {given!r}")

    def rows(self, split: str) -> Iterator[Row]:
        own = ("question", "answer")
        rows = read_rows(
            "gsm8k", split, data=self.data, columns=self.columns, places=PLACES, make=_row, key="question", own=own
        )
        if split != "test" or not self.test_size:
            return rows
        whole = list(rows)  # to its end, where what is wrong with it is said
        if len(whole) < self.test_size:
            raise TaskError(
                f"gsm8k: test_size is {self.test_size}, but test has {len(whole)} rows; lower it, or 0 = all"
            )
        return iter(whole[: self.test_size])

    def prompt(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": ASKED[self.style].format(question=row["question"])}]

    def score(self, row: Row, answer: Answer) -> Verdict:
        marked = find_marked(answer.text)
        if marked.text is not None:
            given = read_quantity(marked.text)
        elif self.find == "last":
            given = last_number(answer.text)
        else:
            return Verdict(self._parts(False, marked, answer), marked.reason)
        correct = given.value == Fraction(row["answer"])
        reason = "" if correct else given.reason or "wrong value"
        return Verdict(self._parts(correct, marked, answer), reason)

    def gold(self, row: Row) -> str:
        """The reference solution, as the style asks for it."""
        number, solution = row["answer"], row["solution"]
        if self.style == "tags":
            return f"<think>{solution}</think>\n<answer>{number}</answer>"
        final = f"The answer is \\boxed{{{number}}}." if self.style == "boxed" else f"#### {number}"
        return f"{solution}\n{final}".lstrip()

    def _parts(self, correct: bool, marked: Marked, answer: Answer) -> dict[str, float]:
        parts = dict.fromkeys(self.parts, 0.0) | {"correct": float(correct)}
        formatted = MARKER[self.style] in marked.kinds
        if self.reward == "verl":
            parts["format"] = 0.1 if formatted and not correct else 0.0
        elif self.reward == "tutor":
            parts["penalty"] = 0.0 if correct else -1.0
            parts["format"] = 0.2 if formatted else -0.2
            parts["length"] = -0.5 if len(answer.text.strip()) < SHORT else 0.0
        return parts


def _row(given: dict[str, Any]) -> Row:
    """A checked row: the number after the last ####, or the whole answer where it is nothing but a number."""
    question, answer = given.get("question"), given.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("question is not a text")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError('answer is neither a number nor a solution that ends with "#### number"')
    solution, _, final = str(answer).rpartition("####")
    number = read_quantity(final)
    if number.value is None:
        raise ValueError(f"answer ends with {final.strip()[:40]!r}: {number.reason}")
    return {
        "question": question.strip(),
        "answer": str(number.value),
        "solution": _CALCULATOR.sub("", solution).strip(),
    }
