"""The task arithmetic: compute an expression of a few whole numbers.

The defaults suit the bundled `tiny` model. Other projects trained larger models on
`Arithmetic(max_terms=6, max_digits=6, parentheses=True, negatives=True, spaces=True, keep=(10, 10**8))`.

Parts: `correct` (the answer tag, or else a box, holds the exact value as a number) and `format` (exactly one
well-formed answer tag). Advice for `reward`: {"format": 0} to train on accuracy alone, {"format": 0.1} when the model
first has to learn the tags. With the coefficient 1, a wrong answer in tags earns half as much as a right one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

from cohort.errors import TaskError
from cohort.tasks.answers import find_answer, read_value
from cohort.tasks.base import Verdict, require, task
from cohort.tasks.draws import Draws
from cohort.tasks.expression import evaluate
from cohort.tasks.splits import MAX_ROWS, assign_split, check_split
from cohort.types import Answer, Message, Row

PHRASINGS = ("What is {}?", "Compute {}.", "Calculate {}.", "Find {}.", "{} = ?")
INSTRUCTIONS = " Think first, then write the number between <answer> and </answer>."
# After this many candidates in a row without a new problem, all problems of these settings count as found.
MAX_FRUITLESS = 20_000


@task("arithmetic")
class Arithmetic:
    """Expressions of random numbers with + - *; every split has numbers of its own (see `splits`)."""

    min_terms: int = 2
    max_terms: int = 3
    min_digits: int = 1
    max_digits: int = 2
    operators: str = "+-*"
    """Any of + - *, drawn with equal probability; write one twice to draw it twice as often."""
    parentheses: bool = False
    """Whether half of the problems with three terms or more have some of them in parentheses."""
    negatives: bool = False
    """Whether a quarter of the numbers, and of the parentheses, have a minus sign."""
    spaces: bool = False
    """Whether half of the operators have spaces around them."""
    keep: tuple[int, int] = (0, 999)
    """Smallest and largest absolute value of answers that are kept; (0, 0) = all. The default allows three digits."""
    instructions: bool = False
    """Tell the model about the answer tags; `tiny` knows them."""
    train_size: int = 10_000
    """Rows of `train`, and of `traces`."""
    test_size: int = 1_000

    name: ClassVar[str]
    accuracy: ClassVar[str] = "correct"
    parts: ClassVar[tuple[str, ...]] = ("correct", "format")

    def __post_init__(self) -> None:
        terms, digits = (self.min_terms, self.max_terms), (self.min_digits, self.max_digits)
        need = partial(require, "arithmetic")
        need(2 <= terms[0] <= terms[1] <= 12, f"2 <= min_terms <= max_terms <= 12, not {terms}")
        need(1 <= digits[0] <= digits[1] <= 9, f"1 <= min_digits <= max_digits <= 9, not {digits}")
        need({*self.operators} <= {*"+-*"}, f"operators among + - *, not {self.operators!r}")
        need(self.operators != "", "at least one operator")
        need(len(self.keep) == 2 and 0 <= self.keep[0] <= self.keep[1], f"0 <= keep in order, not {self.keep}")
        sizes = (self.train_size, self.test_size)
        need(
            all(1 <= size <= MAX_ROWS for size in sizes), f"train_size and test_size from 1 to {MAX_ROWS}, not {sizes}"
        )

    def rows(self, split: str) -> Iterator[Row]:
        """Yields `train_size` or `test_size` different problems of a split, always the same ones.

        Problems are drawn at random: candidate number k depends only on the split, on k and on the settings. Candidates
        whose numbers belong to another split are left out. Raises TaskError for an unknown split, and, after the
        problems that there are, if the settings allow fewer than asked for.
        """
        check_split("arithmetic", split)
        size = self.test_size if split == "test" else self.train_size
        seen: set[str] = set()
        candidate = last_new = -1
        while len(seen) < size:
            candidate += 1
            if candidate - last_new > MAX_FRUITLESS:
                setting = "test_size" if split == "test" else "train_size"
                raise TaskError(
                    f"arithmetic has only {len(seen)} {split} problems with these settings, but {setting} is {size}; "
                    f"lower {setting}, raise max_terms or max_digits, or widen keep, which is {self.keep}"
                )
            row = self._draw_candidate(split, candidate)
            if row is not None and row["id"] not in seen:
                seen.add(row["id"])
                last_new = candidate
                yield row

    def prompt(self, row: Row) -> list[Message]:
        """Returns one user message with the question, and with words about the answer tags if `instructions` is set."""
        return [{"role": "user", "content": row["question"] + (INSTRUCTIONS if self.instructions else "")}]

    def score(self, row: Row, answer: Answer) -> Verdict:
        """Returns the parts "correct" (the answer is the exact value) and "format" (exactly one answer tag, not empty).

        Both are 0 or 1. The value must be a number, or an equation that ends with one. The reason says why an
        answer is not correct.
        """
        extracted = find_answer(answer.full)
        number = read_value(extracted.text) if extracted.text is not None else None
        correct = number is not None and number.value is not None and number.value == row["answer"]
        reason = extracted.reason or (number.reason if number else "") or ("" if correct else "wrong value")
        return Verdict({"correct": float(correct), "format": float(extracted.well_formed)}, reason)

    def gold(self, row: Row) -> str:
        """Returns the right value in answer tags."""
        return f"<answer>{row['answer']}</answer>"

    def _draw_candidate(self, split: str, index: int) -> Row | None:
        """Returns candidate number `index` of a split as a row: a random expression, its question and its value.

        None if its numbers belong to another split or `keep` excludes its value.
        """
        draws = Draws("arithmetic", split, index)
        numbers = [self._draw_number(draws) for _ in range(draws.between(self.min_terms, self.max_terms))]
        if assign_split(numbers) != split:
            return None
        words = self._draw_expression(draws, numbers)
        value = evaluate("".join(words)).value
        assert value is not None and value.denominator == 1, words
        answer = int(value)
        if self.keep != (0, 0) and not self.keep[0] <= abs(answer) <= self.keep[1]:
            return None
        expression = "".join(
            f" {word} " if self.spaces and i % 2 and draws.below(2) else word for i, word in enumerate(words)
        )
        question = draws.choice(PHRASINGS).format(expression)
        # The id leaves spaces and phrasing out: problems that differ only in these count as one.
        return {"id": "".join(words), "expression": expression, "question": question, "answer": answer}

    def _draw_number(self, draws: Draws) -> int:
        """Returns a random number: first the number of digits is drawn, then a number of that many digits."""
        digits = draws.between(self.min_digits, self.max_digits)
        return draws.between(10 ** (digits - 1), 10**digits - 1)

    def _draw_expression(self, draws: Draws, numbers: list[int]) -> list[str]:
        """Returns a random expression of the numbers, in their order, as pieces: number, operator, number, and so on.

        Operators are drawn and, if the settings allow them, minus signs and one pair of parentheses. Signs and
        parentheses are part of the piece of the number beside them.
        """
        # Numbers stand at even indices and operators at odd ones.
        words = [str(numbers[0])]
        for number in numbers[1:]:
            words += [draws.choice(self.operators), str(number)]
        if self.negatives:
            words = ["-" + w if i % 2 == 0 and draws.below(4) == 0 else w for i, w in enumerate(words)]
        if self.parentheses and len(numbers) > 2 and draws.below(2):
            length = draws.between(2, len(numbers) - 1)
            first = draws.between(0, len(numbers) - length)
            last = first + length - 1
            sign = "-" if self.negatives and draws.below(4) == 0 else ""
            words[2 * first] = f"{sign}({words[2 * first]}"
            words[2 * last] = f"{words[2 * last]})"
        return words
