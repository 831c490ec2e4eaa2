r"""Mathematics tasks with answers that can be checked: MATH for training, and five sets for evaluation.

    math12k    MATH (arXiv:2103.03874) in the split of arXiv:2305.20050: 12,000 problems; tested on math500
    math500    the 500 problems of MATH that this split leaves for testing
    aime24     American Invitational Mathematics Examination 2024: 30 problems, whole numbers from 0 to 999
    amc        American Mathematics Competitions: 83 problems, numbers
    minerva    undergraduate science and mathematics (OCWCourses of arXiv:2206.14858): 272 problems
    olympiad   OlympiadBench (arXiv:2402.14008), the English text-only mathematics: 675 problems

The answer is the content of the last closed `\boxed{...}` or `<answer>...</answer>`, whichever ends last. Boxes that
are joined to the last one, as in `\boxed{1}, \boxed{2}`, belong to it (module `boxes`). If there are thoughts, only the
text after them counts. The rest of a completion is ignored, so that no number of the reasoning can be mistaken for the
answer. `equality` decides whether two answers are the same.

Reward parts: `correct`, and `format`. `format` is 1 if the completion has exactly one box, which is closed and not
empty, and the answer is in it. Advice for `reward`: {"format": 0} for models that box their answers already, as
instruction-tuned ones do; {"format": 0.1} for base models that have yet to learn the box. A larger coefficient teaches
boxes, not mathematics.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from cohort.errors import TaskError
from cohort.tasks.answers import remove_thoughts
from cohort.tasks.base import Verdict, require, task
from cohort.tasks.mathematics.boxes import find_answer
from cohort.tasks.mathematics.cleaning import clean_latex
from cohort.tasks.mathematics.equality import Comparison, compare
from cohort.tasks.mathematics.notation import MAX_CHARS
from cohort.tasks.mathematics.symbolic import EXTRA, PACKAGE
from cohort.tasks.places import Place
from cohort.tasks.source import read_rows
from cohort.types import Answer, Message, Row

log = logging.getLogger(__name__)

Style = Literal["boxed", "qwen_math", "none"]

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
COLUMNS = ("problem", "answer", "answers", "level", "subject", "solution", "question")
MATH500 = Place(file="math500.jsonl", hub="HuggingFaceH4/MATH-500", split="test")


@dataclass(frozen=True, kw_only=True)
class Mathematics:
    """Base of the tasks of this module: where rows come from, how they are asked, and how answers are scored."""

    data: str = ""
    """Where the rows are: a file (perhaps with {split} in its name) or a hub data set; "" = $COHORT_DATA or the hub."""
    columns: tuple[str, ...] = ()
    """Columns that have another name there, as in problem=question."""
    style: Style = "boxed"
    """boxed = ask for the box after the problem; qwen_math = ask in a system message, as Qwen-Math models were trained;
    none = the problem alone."""

    name: ClassVar[str]
    accuracy: ClassVar[str] = "correct"
    parts: ClassVar[tuple[str, ...]] = ("correct", "format")
    # per completion, in evaluations that do not set a number
    max_tokens: ClassVar[int] = 3000
    # The limits of `equality` do not cover all of sympy: an answer that takes longer than this is wrong.
    work_seconds: ClassVar[float] = 5.0
    packages: ClassVar[Mapping[str, str]] = {PACKAGE: EXTRA}
    places: ClassVar[Mapping[str, Place]]

    def __post_init__(self) -> None:
        styles = get_args(Style)
        require(self.name, self.style in styles, f"style among {', '.join(styles)}, not {self.style!r}")

    def rows(self, split: str) -> Iterator[Row]:
        """Returns an iterator over the rows of a split that have an answer.

        Raises TaskError for "train" of a set that is for testing, whatever `data` is, and for rows that cannot be read.
        """
        if split == "train" and split not in self.places:
            raise TaskError(
                f"task {self.name} is for testing only and has no train rows; use its test rows, or the task math12k"
            )
        rows = read_rows(
            self.name,
            split,
            data=self.data,
            columns=self.columns,
            places=self.places,
            make=make_row,
            key="problem",
            task_columns=COLUMNS,
        )
        return self._skip_unanswered(rows, split)

    def _skip_unanswered(self, rows: Iterable[Row], split: str) -> Iterator[Row]:
        """Yields the rows whose answer is not empty, and warns about the number of others at the end.

        `split` is for the warning.
        """
        # Some copies of MATH have problems without an answer.
        num_empty = 0
        for row in rows:
            num_empty += not row["answer"]
            if row["answer"]:
                yield row
        if num_empty:
            log.warning("%s: rows of %s without an answer left out: %d", self.name, split, num_empty)

    def prompt(self, row: Row) -> list[Message]:
        """Returns the messages that ask for the answer to a row's problem, in the way that `style` says."""
        problem = row["problem"]
        if self.style == "qwen_math":
            return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": problem}]
        return [{"role": "user", "content": f"{problem}\n\n{INSTRUCTION}" if self.style == "boxed" else problem}]

    def score(self, row: Row, answer: Answer) -> Verdict:
        """Returns the parts "correct" and "format", each 0 or 1, with the reason why an answer is not correct.

        The answer is the last closed box or answer tag after the thoughts, with the boxes joined to it. "format" is 1
        if there is only one \\boxed, the answer is in it, and it has a letter or digit.
        """
        visible, _ = remove_thoughts(answer.text)
        answer_text, is_boxed = find_answer(visible)
        if answer_text is None:
            is_unclosed = "\\boxed" in visible or "<answer>" in visible
            return Verdict(
                {"correct": 0, "format": 0}, "the answer is not closed" if is_unclosed else "no boxed answer"
            )
        is_formatted = is_boxed and visible.count("\\boxed") == 1 and has_letter_or_digit(answer_text)
        result = self.compare_with_gold(row, answer_text)
        return Verdict({"correct": float(result.equal), "format": float(is_formatted)}, result.reason)

    def compare_with_gold(self, row: Row, answer_text: str) -> Comparison:
        """Returns whether the text of an answer equals the gold answer of a row, and if not, why."""
        return compare(row["answer"], answer_text, problem=row["problem"])

    def gold(self, row: Row) -> str:
        """Returns a completion that ends with the gold answer of a row in a box."""
        return f"The answer is \\boxed{{{row['answer']}}}."


@task("math12k")
@dataclass(frozen=True, kw_only=True)
class Math12k(Mathematics):
    """Competition problems of five levels; tested on MATH-500."""

    levels: tuple[int, ...] = ()
    """Train only on these levels, from 1 (easy) to 5, as in 3 4 5; all levels if none is named."""

    places: ClassVar[Mapping[str, Place]] = {
        "train": Place(file="math_train_12k.jsonl", hub="lkevinzc/math-12k", split="train"),
        "test": MATH500,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.name, {*self.levels} <= {1, 2, 3, 4, 5}, f"levels among 1 2 3 4 5, not {self.levels}")

    def rows(self, split: str) -> Iterator[Row]:
        """Returns the rows of a split; of "train" only those of the chosen `levels`, if any are chosen.

        A row whose level is not known is left out then.
        """
        rows = super().rows(split)
        return filter(lambda row: row.get("level") in self.levels, rows) if self.levels and split == "train" else rows


@task("math500")
class Math500(Mathematics):
    """The usual 500 test problems of MATH."""

    places: ClassVar[Mapping[str, Place]] = {"test": MATH500}


@task("aime24")
class AIME24(Mathematics):
    """Thirty hard problems whose answers are whole numbers."""

    places: ClassVar[Mapping[str, Place]] = {
        "test": Place(file="aime24.jsonl", hub="HuggingFaceH4/aime_2024", split="train")
    }


@task("amc")
class AMC(Mathematics):
    """School competition problems whose answers are numbers; the data set of the hub has the 40 problems of 2023."""

    places: ClassVar[Mapping[str, Place]] = {"test": Place(file="amc.jsonl", hub="knoveleng/AMC-23", split="train")}


@task("minerva")
@dataclass(frozen=True, kw_only=True)
class Minerva(Mathematics):
    """Undergraduate science; a problem may accept several forms of an answer, and numbers may be rounded."""

    tolerance: float = 0.01
    """Numbers are equal within this relative distance from the gold number: 1% as the authors graded; 0 = exactly."""

    places: ClassVar[Mapping[str, Place]] = {
        "test": Place(file="minerva_math.jsonl", hub="knoveleng/Minerva-Math", split="train")
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.name, 0 <= self.tolerance < 1, f"a tolerance from 0 to below 1, not {self.tolerance}")

    def compare_with_gold(self, row: Row, answer_text: str) -> Comparison:
        """Returns whether the text of an answer equals one of the accepted answers of a row.

        If not, the reason is that of the comparison with the first one.
        """
        golds = (row["answer"], *row.get("answers", ()))
        results = [compare(gold, answer_text, self.tolerance, row["problem"]) for gold in golds]
        return next((result for result in results if result.equal), results[0])


@task("olympiad")
class Olympiad(Mathematics):
    """Olympiad problems; if a problem asks for several values, their order is free."""

    places: ClassVar[Mapping[str, Place]] = {
        "test": Place(file="olympiadbench.jsonl", hub="knoveleng/OlympiadBench", split="train")
    }


def has_letter_or_digit(answer_text: str) -> bool:
    r"""Returns whether the first MAX_CHARS characters of an answer, cleaned, contain a letter or a digit.

    Letters of a command such as \infty count.

    >>> has_letter_or_digit(r"\\text{}"), has_letter_or_digit("?"), has_letter_or_digit(r"\\infty")
    (False, False, True)
    """
    return any(map(str.isalnum, clean_latex(answer_text[:MAX_CHARS])))


def make_row(raw: dict[str, Any]) -> Row:
    """Returns a row with problem and answer, both text, and perhaps answers, level and subject, made from a raw row.

    The problem may be in the column "question". A missing answer is taken from the closing boxes of the solution.
    `answers` are further accepted forms. Raises ValueError if problem, answer or answers have the wrong type or are
    missing (answers may be); a level or subject that does not fit is left out.
    """
    problem = raw.get("problem", raw.get("question"))
    answer = raw.get("answer")
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError(f'column "problem" has {problem!r:.60}, not a text')
    if answer is None and isinstance(solution := raw.get("solution"), str):
        boxed, is_boxed = find_answer(solution)
        answer = boxed if is_boxed else None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f'column "answer" has {answer!r:.60}, neither a text nor a number')
    accepted = raw.get("answers") or []
    if not isinstance(accepted, list) or not all(isinstance(text, str) for text in accepted):
        raise ValueError(f'column "answers" has {accepted!r:.60}, not a list of texts')
    row = {"problem": problem.strip(), "answer": str(answer).strip()}
    others = [text for text in accepted if text.strip() != row["answer"]]
    level, subject = _read_level(raw.get("level")), raw.get("subject")
    extra = {"answers": others, "level": level, "subject": subject if isinstance(subject, str) else ""}
    return row | {name: value for name, value in extra.items() if value}


def _read_level(raw: Any) -> int:
    """Returns a level from 1 to 5, or 0 for anything else. Some copies of MATH write it as "Level 3"."""
    digits = str(raw).removeprefix("Level").strip()
    return int(digits) if digits in ("1", "2", "3", "4", "5") else 0
