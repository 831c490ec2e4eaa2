r"""Mathematics with a checkable answer: MATH to train on, and the five sets that models are compared on.

    math12k    MATH (arXiv:2103.03874) in the split of arXiv:2305.20050: 12,000 problems; tested on math500
    math500    the 500 problems of MATH that split leaves for testing
    aime24     American Invitational Mathematics Examination 2024: 30 problems, whole numbers from 0 to 999
    amc        American Mathematics Competitions: 83 problems, numbers
    minerva    undergraduate science and mathematics (OCWCourses of arXiv:2206.14858): 272 problems
    olympiad   OlympiadBench (arXiv:2402.14008), the English text-only mathematics: 675 problems

The answer is what stands in the last closed `\boxed{...}` or `<answer>...</answer>`, whichever ends last, after the
thoughts if there are any. Nothing else of a completion is looked at, so that no number of its reasoning can be taken
for its answer. `equality` says when two answers are the same.

Parts: `correct`, and `format`: there is exactly one box, closed and not empty, and the answer is in it. Advice for
`reward`: {"format": 0} for models that box their answers already, as instruction-tuned ones do; {"format": 0.1} for
base models that have to find the box. More than that teaches boxes, not mathematics.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from cohort.errors import TaskError
from cohort.tasks.answers import after_thoughts, inner_box, last_box, last_tag
from cohort.tasks.base import Verdict, require, task
from cohort.tasks.mathematics.equality import EXTRA, PACKAGE, Comparison, compare
from cohort.tasks.mathematics.notation import MAX_CHARS, clean
from cohort.tasks.source import Place, read_rows
from cohort.types import Answer, Message, Row

log = logging.getLogger(__name__)

Style = Literal["boxed", "qwen_math", "none"]

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
COLUMNS = ("problem", "answer", "answers", "level", "subject", "solution", "question")
MATH500 = Place(file="math500.jsonl", hub="HuggingFaceH4/MATH-500", split="test")


@dataclass(frozen=True, kw_only=True)
class Mathematics:
    """What the tasks of this module share."""

    data: str = ""
    """Where the rows lie: a file (perhaps with {split} in its name) or a hub data set; "" = $COHORT_DATA or the hub."""
    columns: tuple[str, ...] = ()
    """Columns that are named otherwise there, as in problem=question."""
    style: Style = "boxed"
    """boxed = ask for the box after the problem; qwen_math = in a system message, as Qwen-Math models were trained;
    none = the problem alone."""

    name: ClassVar[str]
    accuracy: ClassVar[str] = "correct"
    parts: ClassVar[tuple[str, ...]] = ("correct", "format")
    max_tokens: ClassVar[int] = 3000  # of a completion, in evaluations that do not say
    work_seconds: ClassVar[float] = 5.0
    packages: ClassVar[Mapping[str, str]] = {PACKAGE: EXTRA}
    places: ClassVar[Mapping[str, Place]]

    def __post_init__(self) -> None:
        styles = get_args(Style)
        require(self.name, self.style in styles, f"style among {', '.join(styles)}, not {self.style!r}")

    def rows(self, split: str) -> Iterator[Row]:
        if split == "train" and split not in self.places:
            raise TaskError(f"{self.name} is for testing and has no train rows; math12k has them")
        rows = read_rows(
            self.name,
            split,
            data=self.data,
            columns=self.columns,
            places=self.places,
            make=make_row,
            key="problem",
            own=COLUMNS,
        )
        return self._answered(rows, split)

    def _answered(self, rows: Iterable[Row], split: str) -> Iterator[Row]:
        """Some copies of MATH have problems whose answer is empty."""
        empty = 0
        for row in rows:
            empty += not row["answer"]
            if row["answer"]:
                yield row
        if empty:
            log.warning("%s: rows of %s without an answer left out: %d", self.name, split, empty)

    def prompt(self, row: Row) -> list[Message]:
        problem = row["problem"]
        if self.style == "qwen_math":
            return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": problem}]
        return [{"role": "user", "content": f"{problem}\n\n{INSTRUCTION}" if self.style == "boxed" else problem}]

    def score(self, row: Row, answer: Answer) -> Verdict:
        said, _ = after_thoughts(answer.text)
        given, in_box = find_answer(said)
        if given is None:
            half = "\\boxed" in said or "<answer>" in said
            return Verdict({"correct": 0, "format": 0}, "the answer is not closed" if half else "no boxed answer")
        formatted = in_box and said.count("\\boxed") == 1 and says_something(given)
        result = self.judge(row, given)
        return Verdict({"correct": float(result.equal), "format": float(formatted)}, result.reason)

    def judge(self, row: Row, given: str) -> Comparison:
        return compare(row["answer"], given, problem=row["problem"])

    def gold(self, row: Row) -> str:
        return f"The answer is \\boxed{{{row['answer']}}}."


@task("math12k")
@dataclass(frozen=True, kw_only=True)
class Math12k(Mathematics):
    """Competition problems of five levels; tested on MATH-500."""

    levels: tuple[int, ...] = ()
    """Train on these levels only, from 1 (easy) to 5, as in 3 4 5; all of them unless named."""

    places: ClassVar[Mapping[str, Place]] = {
        "train": Place(file="math_train_12k.jsonl", hub="lkevinzc/math-12k", split="train"),
        "test": MATH500,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.name, {*self.levels} <= {1, 2, 3, 4, 5}, f"levels among 1 2 3 4 5, not {self.levels}")

    def rows(self, split: str) -> Iterator[Row]:
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
    """School competition problems whose answers are numbers; the hub's set has the 40 of 2023."""

    places: ClassVar[Mapping[str, Place]] = {"test": Place(file="amc.jsonl", hub="knoveleng/AMC-23", split="train")}


@task("minerva")
@dataclass(frozen=True, kw_only=True)
class Minerva(Mathematics):
    """Undergraduate science; several accepted forms of an answer, and numbers that were rounded on the way."""

    tolerance: float = 0.01
    """Numbers this close, relative to the gold one, are equal: 1% as the authors graded; 0 = exactly."""

    places: ClassVar[Mapping[str, Place]] = {
        "test": Place(file="minerva_math.jsonl", hub="knoveleng/Minerva-Math", split="train")
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.name, 0 <= self.tolerance < 1, f"a tolerance from 0 to below 1, not {self.tolerance}")

    def judge(self, row: Row, given: str) -> Comparison:
        golds = (row["answer"], *row.get("answers", ()))
        results = [compare(gold, given, self.tolerance, row["problem"]) for gold in golds]
        return next((result for result in results if result.equal), results[0])


@task("olympiad")
class Olympiad(Mathematics):
    """Olympiad problems; where several values are asked for, they may come in any order."""

    places: ClassVar[Mapping[str, Place]] = {
        "test": Place(file="olympiadbench.jsonl", hub="knoveleng/OlympiadBench", split="train")
    }


def find_answer(text: str) -> tuple[str | None, bool]:
    r"""The content of the last closed box or answer tag, and whether it is in a box.

    >>> find_answer(r"\boxed{1} is wrong: <answer>it is \boxed{\frac{1}{2}}</answer>")
    ('\\frac{1}{2}', True)
    >>> find_answer("so it is 4")
    (None, False)
    """
    box, (tag, _) = last_box(text), last_tag(text)
    if tag is not None and (box is None or box[1] < tag[0]):
        return text[slice(*tag)], False
    return (None, False) if box is None else (inner_box(text[slice(*box)]), True)


def says_something(given: str) -> bool:
    r"""Whether there is a letter or a digit in it.

    >>> says_something(r"\\text{}"), says_something("?"), says_something(r"\\infty")
    (False, False, True)
    """
    return any(map(str.isalnum, clean(given[:MAX_CHARS])))


def make_row(given: dict[str, Any]) -> Row:
    """A checked row; where there is no answer, it is what the solution puts in a box."""
    problem, answer = given.get("problem", given.get("question")), given.get("answer")
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError("problem is not a text")
    if answer is None and isinstance(solution := given.get("solution"), str) and (box := last_box(solution)):
        answer = solution[slice(*box)]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError("answer is neither a text nor a number")
    accepted = given.get("answers") or []
    if not isinstance(accepted, list) or not all(isinstance(text, str) for text in accepted):
        raise ValueError("answers is not a list of texts")
    row = {"problem": problem.strip(), "answer": str(answer).strip()}
    others = [text for text in accepted if text.strip() != row["answer"]]
    level, subject = _level(given.get("level")), given.get("subject")
    extra = {"answers": others, "level": level, "subject": subject if isinstance(subject, str) else ""}
    return row | {name: value for name, value in extra.items() if value}


def _level(given: Any) -> int:
    """1 to 5, 0 where it is not known; "Level 3" is how some copies of MATH write it."""
    digits = str(given).removeprefix("Level").strip()
    return int(digits) if digits in ("1", "2", "3", "4", "5") else 0
