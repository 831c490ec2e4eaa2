"""The task countdown: reach a target from given numbers, each used exactly once, with + - * / and parentheses.

Generated problems are solvable by construction: the target is the value of a random expression of the numbers. With
the setting `data`, rows come from there, with the columns `nums`, `target` and, optionally, `solution`.

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
from cohort.tasks.splits import MAX_ROWS, assign_split, check_split
from cohort.types import Answer, Message, Row

INSTRUCTIONS = " Use each number once, with + - * / and parentheses. Put the expression between <answer> and </answer>."
OPENING = "Let me solve this step by step.\n<think>"
TRIES = 8  # expressions that are drawn over the same numbers before other numbers are drawn
# After this many candidates in a row without a new problem, all problems of these settings count as found.
MAX_FRUITLESS = 20_000
_COMMUTATIVE = "+*"


@task("countdown")
class Countdown:
    """Three or four numbers and a target to reach; every split has numbers of its own (see `splits`)."""

    min_numbers: int = 3
    max_numbers: int = 4
    max_number: int = 99
    """Largest number that is drawn; the smallest is 1."""
    min_target: int = 10
    max_target: int = 99
    operators: str = "+-*/"
    """Operators of the hidden solutions; answers may always use all four."""
    data: str = ""
    """A file or hub data set instead of generated problems; a file without {split} in its name is for testing only."""
    columns: tuple[str, ...] = ()
    """Columns that have another name in `data`, as in nums=numbers."""
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
        numbers = (self.min_numbers, self.max_numbers)
        targets = (self.min_target, self.max_target)
        need = partial(require, "countdown")
        need(2 <= numbers[0] <= numbers[1] <= 8, f"2 <= min_numbers <= max_numbers <= 8, not {numbers}")
        need(0 <= targets[0] <= targets[1] <= 10**9, f"0 <= min_target <= max_target <= 1000000000, not {targets}")
        need(1 <= self.max_number <= 10**6, f"1 <= max_number <= 1000000, not {self.max_number}")
        need({*self.operators} <= {*"+-*/"}, f"operators among + - * /, not {self.operators!r}")
        need(self.operators != "", "at least one operator")
        sizes = (self.train_size, self.test_size)
        need(
            all(1 <= size <= MAX_ROWS for size in sizes), f"train_size and test_size from 1 to {MAX_ROWS}, not {sizes}"
        )
        need(self.data != "" or not self.columns, f"data, because columns is given ({' '.join(self.columns)})")

    def rows(self, split: str) -> Iterator[Row]:
        """Returns the rows of a split, read from the setting `data` or, without it, generated.

        Raises TaskError for a split other than train, test and traces. With `data` there is no split traces.
        """
        check_split("countdown", split)
        return self._read_data(split) if self.data else self._generate_rows(split)

    def prompt(self, row: Row) -> list[Message]:
        """Returns a user message with the numbers and the target, and with the rules if `instructions` is set.

        With `think`, an assistant message that opens <think> follows, for the model to continue.
        """
        question = f"Make {row['target']} from {', '.join(map(str, row['nums']))}."
        asked = [{"role": "user", "content": question + (INSTRUCTIONS if self.instructions else "")}]
        return [*asked, {"role": "assistant", "content": OPENING}] if self.think else asked

    def score(self, row: Row, answer: Answer) -> Verdict:
        """Returns the parts "correct" and "format", each 0 or 1, with the reason why an answer is not correct.

        A correct expression uses exactly the given numbers and equals the target. "format" is 1 for exactly one
        well-formed answer tag.
        """
        # `full` includes the beginning of the answer that the setting `think` forces, with its opening <think>.
        extracted = find_answer(answer.full)
        reason = extracted.reason
        if extracted.text is not None:
            expression = read_expression(extracted.text)
            if expression.value is None:
                reason = expression.reason
            elif sorted(expression.numbers) != sorted(row["nums"]):
                reason = "not exactly the given numbers"
            elif expression.value != row["target"]:
                reason = "misses the target"
        return Verdict({"correct": float(not reason), "format": float(extracted.well_formed)}, reason)

    def gold(self, row: Row) -> str:
        """Returns the row's solution in answer tags, after the end of the thoughts that `think` opens.

        Raises TaskError for a row that was read without a solution.
        """
        if not row.get("solution"):
            raise TaskError(
                f'countdown, row "{row["id"]}" of the data has no solution; add it in a column "solution", or '
                "leave out --task.data to use generated problems"
            )
        return f"{'</think>' if self.think else ''}<answer>{row['solution']}</answer>"

    def _generate_rows(self, split: str) -> Iterator[Row]:
        """Yields `train_size` or `test_size` different generated problems of a split, always the same ones.

        Candidate k depends only on the split, on k and on the settings. Raises TaskError if the settings allow fewer
        problems.
        """
        size = self.test_size if split == "test" else self.train_size
        seen: set[tuple[tuple[int, ...], int]] = set()
        candidate = last_new = -1
        while len(seen) < size:
            candidate += 1
            if candidate - last_new > MAX_FRUITLESS:
                setting = "test_size" if split == "test" else "train_size"
                raise TaskError(
                    f"countdown has only {len(seen)} {split} problems with these settings, but {setting} is {size}; "
                    f"lower {setting}, raise max_numbers, max_number or max_target, or lower min_target"
                )
            row = self._draw_candidate(split, candidate)
            if row is not None and _make_problem_key(row) not in seen:
                seen.add(_make_problem_key(row))
                last_new = candidate
                yield row

    def _draw_candidate(self, split: str, index: int) -> Row | None:
        """Returns candidate number `index` of a split as a row: random numbers, a target and a solution.

        None if its numbers belong to another split, or if none of the `TRIES` expressions drawn has an allowed target.
        """
        draws = Draws("countdown", split, index)
        size = draws.between(self.min_numbers, self.max_numbers)
        nums = [draws.between(1, self.max_number) for _ in range(size)]
        if assign_split(nums) != split:
            return None
        for _ in range(TRIES):
            target, solution = self._draw_solution(draws, nums)
            if self.min_target <= target <= self.max_target:
                return _make_row({"nums": nums, "target": target, "solution": solution})
        return None

    def _draw_solution(self, draws: Draws, nums: list[int]) -> tuple[int, str]:
        """Returns the value and the text of a random expression of all `nums`; (-1, "") if a division is not possible.

        Two random pieces are joined until one is left. The smaller number is subtracted from the larger one and only
        exact quotients are used, so that every intermediate result is a whole number >= 0: the kind of solution that a
        person would find. A drawn division by 0 or with a remainder ends the attempt. The text has the parentheses that
        it needs and no others.
        """
        # A piece is its value, its text and the operator that joined it last ("" for a given number).
        pieces = [(n, str(n), "") for n in nums]
        while len(pieces) > 1:
            left, right = (pieces.pop(draws.below(len(pieces))) for _ in range(2))
            operator = draws.choice(self.operators)
            if operator == "-" and left[0] < right[0]:
                left, right = right, left
            value = _compute_whole(left[0], operator, right[0])
            if value is None:
                return -1, ""
            text = _parenthesise(left, operator, False) + operator + _parenthesise(right, operator, True)
            pieces.append((value, text, operator))
        return pieces[0][0], pieces[0][1]

    def _read_data(self, split: str) -> Iterator[Row]:
        """Returns the rows of a split of the setting `data`, each problem once; its first row counts.

        Problems with the same numbers, in any order, and the same target are the same. Raises TaskError for data that
        cannot be used.
        """
        first: dict[str, Row] = {}

        def make_once(raw: dict[str, Any]) -> Row:
            """Returns the row of a problem, or the earlier row if the same problem was read before.

            Rows with the same numbers in another order, or with another solution, are the same problem. Raises
            ValueError for a raw row that does not fit.
            """
            row = _make_row(raw)
            # The reader compares rows of the same id and refuses different ones, so the first row is given again.
            problem = _make_id(sorted(row["nums"]), row["target"])
            return first.setdefault(problem, row | {"id": problem})

        return read_rows(
            "countdown",
            split,
            data=self.data,
            columns=self.columns,
            places={},
            make=make_once,
            key="id",
            task_columns=("nums", "target", "solution"),
        )


def _compute_whole(left: int, operator: str, right: int) -> int | None:
    """Returns the result of one operation with + - * or /; None for a division by zero or with a remainder."""
    if operator == "/":
        return left // right if right and left % right == 0 else None
    return left + right if operator == "+" else left - right if operator == "-" else left * right


def _parenthesise(piece: tuple[int, str, str], operator: str, right: bool) -> str:
    """Returns the text of `piece` as an operand of `operator`, in parentheses if it needs them.

    `piece` is (value, text, operator that joined it last); `right` says whether it is the right operand.
    """
    _, text, top = piece
    # A sum inside a product needs parentheses, and so does a right operand after - or / of the same level.
    looser = top in ("+", "-") and operator in ("*", "/")
    same_level = top != "" and (top in "+-") == (operator in "+-")
    return f"({text})" if looser or (right and same_level and operator not in _COMMUTATIVE) else text


def _make_problem_key(row: Row) -> tuple[tuple[int, ...], int]:
    """Returns the sorted numbers and the target: equal for rows of the same problem."""
    return tuple(sorted(row["nums"])), row["target"]


def _make_row(raw: dict[str, Any]) -> Row:
    """Returns a row of the task from a raw row with `nums`, `target` and perhaps `solution`; "" if that is missing.

    Its id is as in "3-8-2=24". Raises ValueError unless `nums` is a list of whole numbers >= 0, not empty, and `target`
    a whole number.
    """
    nums = _parse_cell(raw.get("nums"))
    target = _parse_cell(raw.get("target"))
    whole = isinstance(nums, list) and all(type(n) is int and n >= 0 for n in nums) and type(target) is int
    if not whole or not nums:
        raise ValueError(f"needs nums (a list of whole numbers >= 0) and target (a whole number), not {str(raw)[:80]}")
    return {"id": _make_id(nums, target), "nums": nums, "target": target, "solution": str(raw.get("solution") or "")}


def _parse_cell(cell: Any) -> Any:
    """Returns the value of a table cell.

    Text that is JSON is parsed, as "[3, 8, 2]" in a CSV file; the rest is unchanged.
    """
    try:
        return json.loads(cell) if isinstance(cell, str) else cell
    except (ValueError, RecursionError):
        return cell


def _make_id(nums: list[int], target: int) -> str:
    """Returns the id of a problem, as in "3-8-2=24"."""
    return f"{'-'.join(map(str, nums))}={target}"
