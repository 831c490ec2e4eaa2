"""The task GSM8K: grade-school word problems whose answer is one number (arXiv:2110.14168).

There are 7,473 problems to train on and 1,319 to test. An answer is right if the last marked number equals the
reference exactly: `numbers` says how the number is found and read. The setting `reward` chooses what a completion
earns, as the sum of the parts:

    plain   1 if right, 0 if wrong.
    verl    1 if right, 0.1 if wrong but in the marker that was asked for, 0 otherwise. This is verl's scorer as recipes
            set it; its own default pays nothing for the marker.
    tutor   1 if right, -1 if wrong; 0.2 more with the marker that was asked for, 0.2 less without it; 0.5 less for
            fewer than 30 characters. The sum is from -1.7 to 1.2, as in the gsm8k-grpo project.

A marker counts for the format if it holds a number. The graders of the original projects have these faults, which this
one does not have: the first `####` wins, so that an answer written before the reasoning counts; "1,200" is read as 1;
signs and decimals are lost; values are compared as strings, so that "18.00" is not 18; the format is paid in addition
to a right answer; the prompt is searched for the answer; only the last 300 characters are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, ClassVar, Literal, get_args

from cohort.errors import TaskError
from cohort.tasks.base import Verdict, require, task
from cohort.tasks.numbers import (
    MarkedAnswer,
    MarkerKind,
    find_marked_answer,
    find_stated_answer,
    read_last_number,
    read_quantity,
)
from cohort.tasks.places import Place
from cohort.tasks.source import read_rows
from cohort.tasks.splits import MAX_ROWS
from cohort.types import Answer, Message, Row

Style = Literal["boxed", "hashes", "tags", "tutor"]
Reward = Literal["plain", "verl", "tutor"]
Find = Literal["marked", "stated", "last"]

PLACES = {
    "train": Place(file="gsm8k_train.jsonl", hub="openai/gsm8k:main", split="train"),
    "test": Place(file="gsm8k_test.jsonl", hub="openai/gsm8k:main", split="test"),
}
PROMPTS: dict[Style, str] = {
    "boxed": "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    "hashes": '{question} Let\'s think step by step and output the final answer after "####".',
    "tags": "{question}\nThink between <think> and </think>, then write the number between <answer> and </answer>.",
    "tutor": "You are a math tutor. Reason concisely, then end with a line of #### and the number.\n\n{question}",
}
MARKER: dict[Style, MarkerKind] = {"boxed": "boxed", "hashes": "hashes", "tags": "tags", "tutor": "hashes"}
MIN_CHARS = 30  # a shorter completion is penalised by the reward "tutor"
_CALCULATOR = re.compile(r"<<[^<>]*>>")  # calculator annotations in the data set's solutions: 9 * 2 = <<9*2=18>>18


@task("gsm8k")
class GSM8K:
    """Word problems with a number as their answer."""

    data: str = ""
    """Source of the rows: a file (perhaps with {split} in its name) or a hub data set; "" = $COHORT_DATA or the hub."""
    columns: tuple[str, ...] = ()
    """Columns that have another name in `data`, as in question=problem."""
    test_size: int = 0
    """The first N test questions (500 = the subset of the gsm8k-grpo project); 0 = all 1,319."""
    style: Style = "boxed"
    """How the prompt asks for the answer: in \\boxed{}, after ####, in answer tags, or as a tutor (after ####)."""
    reward: Reward = "plain"
    """What earns reward: a right answer; also the marker alone (0.1); or answer, format and length, with penalties."""
    find: Find = "marked"
    """Which number is the answer: marked = the last marked one; if none is marked, stated = the one after the last "The
    answer is", last = the last one of all."""

    name: ClassVar[str]
    accuracy: ClassVar[str] = "correct"
    parts: ClassVar[tuple[str, ...]] = ("correct", "penalty", "format", "length")
    max_tokens: ClassVar[int] = 1024

    def __post_init__(self) -> None:
        require("gsm8k", 0 <= self.test_size <= MAX_ROWS, f"test_size from 0 to {MAX_ROWS}, not {self.test_size}")
        for setting, kind in {"style": Style, "reward": Reward, "find": Find}.items():
            known = get_args(kind)
            value = getattr(self, setting)
            require("gsm8k", value in known, f"{setting} among {', '.join(known)}, not {value!r}")

    def rows(self, split: str) -> Iterator[Row]:
        """Returns the rows of a split; of "test" only the first `test_size`, unless that is 0.

        Raises TaskError if test has fewer, and for rows that cannot be read.
        """
        rows = read_rows(
            "gsm8k",
            split,
            data=self.data,
            columns=self.columns,
            places=PLACES,
            make=_make_row,
            key="question",
            task_columns=("question", "answer"),
        )
        if split != "test" or not self.test_size:
            return rows
        # All rows are read even if few are wanted, so that bad and repeated rows anywhere in the data are reported.
        all_rows = list(rows)
        if len(all_rows) < self.test_size:
            raise TaskError(
                f"gsm8k: test_size is {self.test_size}, but there are only {len(all_rows)} test rows; "
                f"set --task.test-size to {len(all_rows)} or less, or to 0 for all rows"
            )
        return iter(all_rows[: self.test_size])

    def prompt(self, row: Row) -> list[Message]:
        """Returns one user message with the question, which asks for the answer in the way that `style` says."""
        return [{"role": "user", "content": PROMPTS[self.style].format(question=row["question"])}]

    def score(self, row: Row, answer: Answer) -> Verdict:
        """Returns the reward parts of an answer, with the reason why it is not right.

        The answer is the last marked number in the completion. If nothing is marked, it is the number after the last
        "The answer is" with find = stated, and the last number of all with find = last. A marked or stated text that is
        not one number is wrong.
        """
        # Only the completion is searched: `answer.full` may begin with text that the model did not write.
        marked = find_marked_answer(answer.text)
        if marked.text is not None:
            number = read_quantity(marked.text)
        elif self.find == "stated" and (stated := find_stated_answer(answer.text)) is not None:
            number = read_quantity(stated)
        elif self.find == "last":
            number = read_last_number(answer.text)
        else:
            return Verdict(self._make_parts(False, marked, answer), marked.reason)
        correct = number.value == Fraction(row["answer"])
        reason = "" if correct else number.reason or "wrong value"
        return Verdict(self._make_parts(correct, marked, answer), reason)

    def gold(self, row: Row) -> str:
        """Returns the reference solution, followed by its number in the marker that `style` asks for.

        With style = tags, the solution stands between <think> and </think>.
        """
        number, solution = row["answer"], row["solution"]
        if self.style == "tags":
            return f"<think>{solution}</think>\n<answer>{number}</answer>"
        final = f"The answer is \\boxed{{{number}}}." if self.style == "boxed" else f"#### {number}"
        return f"{solution}\n{final}".lstrip()

    def _make_parts(self, correct: bool, marked: MarkedAnswer, answer: Answer) -> dict[str, float]:
        """Returns the reward parts of an answer, as the setting `reward` defines them; unused parts are 0.

        `correct` says whether the answer is right, and `marked` which markers it has, for the part "format".
        """
        parts = dict.fromkeys(self.parts, 0.0) | {"correct": float(correct)}
        formatted = MARKER[self.style] in marked.kinds
        if self.reward == "verl":
            # The format is paid only if the answer is wrong, so that a right answer earns 1 and not 1.1.
            parts["format"] = 0.1 if formatted and not correct else 0.0
        elif self.reward == "tutor":
            parts["penalty"] = 0.0 if correct else -1.0
            parts["format"] = 0.2 if formatted else -0.2
            parts["length"] = -0.5 if len(answer.text.strip()) < MIN_CHARS else 0.0
        return parts


def _make_row(raw: dict[str, Any]) -> Row:
    """Returns a row with question, answer (the number as text) and solution, made from a raw row of the data set.

    The number stands after the last "####" of the raw answer, or is the whole of it; then the solution is "".
    Calculator annotations are removed from the solution. Raises ValueError for raw columns that do not fit.
    """
    question = raw.get("question")
    answer = raw.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f'column "question" has {question!r:.60}, not a text')
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(
            f'column "answer" has {answer!r:.60}, neither a number nor a solution that ends with "#### number"'
        )
    # Without "####" the solution is empty and the whole answer must be a number.
    solution, _, final = str(answer).rpartition("####")
    number = read_quantity(final)
    if number.value is None:
        raise ValueError(f"answer ends with {final.strip()[:40]!r}, which is not read as a number: {number.reason}")
    return {
        "question": question.strip(),
        "answer": str(number.value),
        "solution": _CALCULATOR.sub("", solution).strip(),
    }
