"""The task code: the model writes a program in Python, which is run against tests in a sandbox.

A row has a prompt and tests: inputs with outputs, calls of functions with expected results, or assertions. `rows` says
in which forms they may be given, `judging` how they are judged, `cohort.sandbox` how programs are run. The program is
the last block of Python in the answer.

A program that is wrong, raises, takes too long, uses too much or tries what it may not is a wrong answer. A sandbox
that does not start is a failure, never a score.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

from cohort.errors import TaskError
from cohort.sandbox import ProgramLimits, find_missing
from cohort.sandbox.run import get_mode
from cohort.tasks.base import Verdict, require, task
from cohort.tasks.code.judging import judge_program
from cohort.tasks.code.programs import find_program
from cohort.tasks.code.rows import COLUMNS, Asserts, make_row
from cohort.tasks.places import SPLITS, RowSource, locate_rows, parse_columns, rename_columns, select_split
from cohort.tasks.source import is_without_test_rows, read_sources
from cohort.types import Answer, Message, Row

log = logging.getLogger(__name__)
NAME = "code"
BUNDLED = str(Path(__file__).with_name("problems.json"))
MAX_SECONDS = 10.0
WALL_PER_CPU_SECOND = 3.0  # a program that waits, or runs on a busy machine, has this much more time by the clock
MEMORY = (32, 4096)  # MB: least and most
_ASKED = "Write the program in Python, in one block that begins with ```python and ends with ```."


@task(NAME)
class Code:
    """Programs in Python, run against tests in a sandbox."""

    data: str = ""
    """Source of the rows: a file, with {split} in its name or a column "split", or a hub data set; "" = the problems
    that come with Cohort."""
    columns: tuple[str, ...] = ()
    """Columns that have another name in `data`, as in prompt=question."""
    shown: int = 1
    """How many of a row's tests the prompt shows."""
    asserts: Asserts = "refuse"
    """What to do with tests that cannot be judged outside the sandbox: refuse the data, skip such rows, or trust them:
    they run in the program's own process, where a program can cheat."""
    seconds: float = 4.0
    """CPU seconds of a run: for one input, or for all calls of a row together."""
    memory: int = 256
    """Megabytes of memory that a program may use."""

    name: ClassVar[str]
    accuracy: ClassVar[str] = "correct"
    parts: ClassVar[tuple[str, ...]] = ("correct", "passed")
    max_tokens: ClassVar[int] = 512
    # The pool then waits up to a minute, which is longer than all runs of an answer take.
    work_seconds: ClassVar[float] = 10.0
    needs_sandbox: ClassVar[bool] = True

    def __post_init__(self) -> None:
        known = get_args(Asserts)
        require(NAME, self.asserts in known, f"asserts among {', '.join(known)}, not {self.asserts!r}")
        require(NAME, self.shown >= 0, f"shown of 0 or more, not {self.shown}")
        require(NAME, 0 < self.seconds <= MAX_SECONDS, f"seconds above 0, up to {MAX_SECONDS:g}, not {self.seconds}")
        low, high = MEMORY
        require(NAME, low <= self.memory <= high, f"memory from {low} to {high} MB, not {self.memory}")

    def rows(self, split: str) -> Iterator[Row]:
        """Returns the rows of a split, "train" or "test". Raises TaskError for another one, and for bad rows."""
        if split not in SPLITS:
            raise TaskError(f'task "{NAME}" has no split "{split}" in its data; use one of {", ".join(SPLITS)}')
        if is_without_test_rows(NAME, split, self.data):
            return iter(())
        rows = read_sources(
            NAME,
            self._find_source(split),
            None if split == "test" else lambda: self._find_source("test"),
            columns=self._list_columns(),
            make=partial(make_row, asserts=self.asserts),
            key="prompt",
            task_columns=COLUMNS,
        )
        return self._leave_out(rows)

    def _find_source(self, split: str) -> RowSource:
        """Returns the source of a split: a file of its own, a split of the hub, or some rows of a file."""
        name = self.data or BUNDLED
        column = next((c.partition("=")[2] for c in self.columns if c.startswith("split=")), "split")
        source = locate_rows(name, split)
        return source if "{split}" in name or source.remote else select_split(source, split, column)

    def _list_columns(self) -> list[str]:
        """Returns the entries of `columns` but the one for the column that names the split."""
        return [entry for entry in self.columns if not entry.startswith("split=")]

    def locate_gold(self, row: Row) -> str:
        """Returns where the solution of a row stands: column, file and line; "" if it is not found there any more."""
        names = parse_columns(NAME, self._list_columns(), COLUMNS)
        for split in SPLITS:
            try:
                source = self._find_source(split)
                for number, raw in source.open():
                    given = rename_columns(source.describe_row(number), raw, names)
                    if str(given.get("prompt") or given.get("text")).strip() == row["prompt"].strip():
                        column = next(
                            (c for c in ("solution", "code", "canonical_solution") if given.get(c)), "solution"
                        )
                        return f'column "{names.get(column, column)}" of {source.describe_row(number)}'
            except TaskError:
                # There need not be both splits.
                continue
        return ""

    def _leave_out(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yields the rows whose tests can be judged. A warning at the end counts the others."""
        num_skipped = 0
        for row in rows:
            if row.pop("skipped"):
                num_skipped += 1
            else:
                yield row
        if num_skipped:
            log.warning("%s: rows left out whose tests cannot be judged outside the sandbox: %d", NAME, num_skipped)

    def prompt(self, row: Row) -> list[Message]:
        """Returns one user message: the problem, the first `shown` tests, and how to write the program."""
        problem = row["prompt"]
        if row["head"]:
            problem = f"Complete this function:\n\n```python\n{problem.rstrip()}\n```"
        examples = [_show_test(test) for test in row["tests"][: self.shown]]
        shown = "\n\n".join(["For example:", *examples]) if examples else ""
        return [{"role": "user", "content": "\n\n".join(filter(None, (problem, shown, _ASKED)))}]

    def score(self, row: Row, answer: Answer) -> Verdict:
        """Returns whether the program passes all tests, and the share that it passes, with the reason for a failure.

        Raises TaskError if there is no sandbox on this machine, and SandboxError if one did not start.
        """
        found = find_program(answer.text)
        if not found.source:
            return Verdict({"correct": 0.0, "passed": 0.0}, found.reason)
        if get_mode() == "auto" and (missing := find_missing()):
            raise TaskError(
                f"{NAME} needs a sandbox for the programs of the model: {missing}. Allow user namespaces on this "
                "machine, or run programs without a sandbox: --scoring.sandbox none"
            )
        limits = ProgramLimits(
            cpu_seconds=self.seconds, wall_seconds=WALL_PER_CPU_SECOND * self.seconds, memory_mb=self.memory
        )
        source = "\n".join(filter(None, (row["setup"], row["head"], found.source)))
        judged = judge_program(source, row["tests"], frozenset(row["functions"]), limits)
        share = sum(judged.passed) / len(judged.passed)
        return Verdict({"correct": float(all(judged.passed)), "passed": share}, judged.reason)

    def gold(self, row: Row) -> str:
        """Returns the solution as a block of Python. Raises TaskError if the row has none."""
        if not row["solution"]:
            raise TaskError(f'{NAME}: row "{row["id"]}" has no right answer; add a column "solution" with a program')
        return f"```python\n{row['solution'].rstrip()}\n```"


def _show_test(test: dict[str, Any]) -> str:
    """Returns a test as a piece of a prompt."""
    if "input" in test:
        return f"Input:\n```\n{test['input'].rstrip()}\n```\nOutput:\n```\n{test['output'].rstrip()}\n```"
    if "function" in test:
        arguments = ", ".join(map(repr, test["arguments"]))
        return f"```python\n{test['function']}({arguments})  # returns {test['expected']!r}\n```"
    return f"```python\n{test.get('assert') or test['statement']}\n```"
