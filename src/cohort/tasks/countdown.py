"""Countdown: reach the target from the given numbers, each used exactly once, with + - * / and parentheses.

Generated problems are solvable by construction: the target is what a random expression of the numbers gives.
With `data`, rows come from there: `nums`, `target` and, optionally, `solution`.

Parts: `correct` (the expression in the answer tag, or else in a box, uses exactly the given numbers and is
equal to the target, in exact fractions) and `format` (exactly one well-formed answer tag). Advice for
`reward`: {"format": 0.1} for models that have to find the tags, {"format": 0} otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from cohort.errors import TaskError
from cohort.tasks.answers import find_answer, read_expression
from cohort.tasks.base import Verdict, require, task
from cohort.tasks.draws import Draws
from cohort.tasks.source import read_rows
from cohort.tasks.splits import check_split, split_of
from cohort.types import Answer, Message, Row

INSTRUCTIONS = " Use each number once, with + - * / and parentheses. Put the expression between <answer> and </answer>."
OPENING = "Let me solve this step by step.\n<think>"
TRIES = 8  # expressions over the same numbers before other numbers are drawn
PATIENCE = 20_000  # candidates in a row that bring nothing new before the space counts as exhausted
_COMMUTES = "+*"


@task("countdown")
class Countdown:
    """Three or four numbers and a target; every split has its own numbers (see `splits`)."""

    min_numbers: int = 3
    max_numbers: int = 4
    max_number: int = 99
    """Numbers are drawn from 1 to this."""
    min_target: int = 10
    max_target: int = 99
    operators: str = "+-*/"
    """What the hidden solutions are made of; answers may always use all four."""
    data: str = ""
    """A file or hub data set instead of generated problems; a file is for testing, unless {split} is in its name."""
    columns: tuple[str, ...] = ()
    """Columns that `data` names otherwise, as in nums=numbers."""
    instructions: bool = False
    """State the rules and the answer tags; `tiny` knows them."""
    think: bool = False
    """End the prompt with an assistant's message that opens <think>, for the model to continue (TinyZero)."""
    train_size: int = 10_000
    """Rows of `train`, and of `traces`."""
    test_size: int = 1_000

    name: ClassVar[str]
    accuracy: ClassVar[str] = "correct"
    parts: ClassVar[tuple[str, ...]] = ("correct", "format")
    max_tokens: ClassVar[int] = 1024

    def __post_init__(self) -> None:
        numbers, targets = (self.min_numbers, self.max_numbers), (self.min_target, self.max_target)
        need = partial(require, "countdown")
        need(2 <= numbers[0] <= numbers[1] <= 8, f"2 <= min_numbers <= max_numbers <= 8, not {numbers}")
        need(0 <= targets[0] <= targets[1], f"0 <= min_target <= max_target, not {targets}")
        need(1 <= self.max_number <= 10**6, f"1 <= max_number <= 1000000, not {self.max_number}")
        need({*self.operators} <= {*"+-*/"}, f"operators among + - * /, not {self.operators!r}")
        need(self.operators != "", "at least one operator")
        need(min(self.train_size, self.test_size) >= 1, "train_size and test_size of at least 1")
        need(self.data != "" or not self.columns, f"data for its columns {' '.join(self.columns)} to be in")

    def rows(self, split: str) -> Iterator[Row]:
        check_split("countdown", split)
        return self._read(split) if self.data else self._generate(split)

    def prompt(self, row: Row) -> list[Message]:
        question = f"Make {row['target']} from {', '.join(map(str, row['nums']))}."
        asked = [{"role": "user", "content": question + (INSTRUCTIONS if self.instructions else "")}]
        return [*asked, {"role": "assistant", "content": OPENING}] if self.think else asked

    def score(self, row: Row, answer: Answer) -> Verdict:
        found = find_answer(answer.full)
        reason = found.reason
        if found.text is not None:
            given = read_expression(found.text)
            if given.value is None:
                reason = given.reason
            elif sorted(given.numbers) != sorted(row["nums"]):
                reason = "not exactly the given numbers"
            elif given.value != row["target"]:
                reason = "misses the target"
        return Verdict({"correct": float(not reason), "format": float(found.well_formed)}, reason)

    def gold(self, row: Row) -> str:
        if not row.get("solution"):
            raise TaskError(f'countdown, row "{row["id"]}" comes without a solution')
        return f"<answer>{row['solution']}</answer>"

    def _generate(self, split: str) -> Iterator[Row]:
        size = self.test_size if split == "test" else self.train_size
        seen: set[tuple[tuple[int, ...], int]] = set()
        candidate = last_new = -1
        while len(seen) < size:
            candidate += 1
            if candidate - last_new > PATIENCE:
                raise TaskError(
                    f"countdown has only {len(seen)} problems for {split} with these settings, not {size}: "
                    f"lower {'test' if split == 'test' else 'train'}_size or widen the numbers or targets"
                )
            row = self._candidate(split, candidate)
            if row is not None and _problem(row) not in seen:
                seen.add(_problem(row))
                last_new = candidate
                yield row

    def _candidate(self, split: str, index: int) -> Row | None:
        draws = Draws("countdown", split, index)
        size = draws.between(self.min_numbers, self.max_numbers)
        nums = [draws.between(1, self.max_number) for _ in range(size)]
        if split_of(nums) != split:
            return None
        for _ in range(TRIES):
            target, solution = self._combine(draws, nums)
            if self.min_target <= target <= self.max_target:
                return _row({"nums": nums, "target": target, "solution": solution})
        return None

    def _combine(self, draws: Draws, nums: list[int]) -> tuple[int, str]:
        """Join two random pieces until one is left; written with the parentheses it needs and no others.

        Differences are taken the positive way round and only exact quotients are used, so that every
        intermediate result is a whole number >= 0: the kind of solution a person would find.
        """
        pieces = [(n, str(n), "") for n in nums]
        while len(pieces) > 1:
            left, right = (pieces.pop(draws.below(len(pieces))) for _ in range(2))
            operator = draws.choice(self.operators)
            if operator == "-" and left[0] < right[0]:
                left, right = right, left
            value = _whole(left[0], operator, right[0])
            if value is None:
                return -1, ""
            text = _wrapped(left, operator, False) + operator + _wrapped(right, operator, True)
            pieces.append((value, text, operator))
        return pieces[0][0], pieces[0][1]

    def _read(self, split: str) -> Iterator[Row]:
        first: dict[str, Row] = {}

        def make(raw: dict[str, Any]) -> Row:
            """Numbers in another order or another solution make no other problem: its first row stands for it."""
            row = _row(raw)
            problem = _identity(sorted(row["nums"]), row["target"])
            return first.setdefault(problem, row | {"id": problem})

        return read_rows(
            "countdown",
            split,
            data=self.data,
            columns=self.columns,
            places={},
            make=make,
            key="id",
            own=("nums", "target", "solution"),
        )


def _whole(left: int, operator: str, right: int) -> int | None:
    if operator == "/":
        return left // right if right and left % right == 0 else None
    return left + right if operator == "+" else left - right if operator == "-" else left * right


def _wrapped(piece: tuple[int, str, str], operator: str, right: bool) -> str:
    _, text, top = piece
    looser = top in ("+", "-") and operator in ("*", "/")
    same_level = top != "" and (top in "+-") == (operator in "+-")
    return f"({text})" if looser or (right and same_level and operator not in _COMMUTES) else text


def _problem(row: Row) -> tuple[tuple[int, ...], int]:
    return tuple(sorted(row["nums"])), row["target"]


def _row(given: dict[str, Any]) -> Row:
    """A checked row; its id is the problem itself."""
    nums, target = _value(given.get("nums")), _value(given.get("target"))
    whole = isinstance(nums, list) and all(type(n) is int and n >= 0 for n in nums) and type(target) is int
    if not whole or not nums:
        raise ValueError(f"needs nums (whole numbers >= 0) and a whole target, not {str(given)[:80]}")
    return {"id": _identity(nums, target), "nums": nums, "target": target, "solution": str(given.get("solution") or "")}


def _value(cell: Any) -> Any:
    """Columns of a CSV file hold text: "[3, 8, 2]", "24"."""
    try:
        return json.loads(cell) if isinstance(cell, str) else cell
    except (ValueError, RecursionError):
        return cell


def _identity(nums: list[int], target: int) -> str:
    return f"{'-'.join(map(str, nums))}={target}"
