"""The task `rows`: prompts of your own file, scored by reward functions of your own, without a task class.

    cohort train quickstart --task rows --task.data questions.jsonl --task.rewards rewards.py:brevity rewards.py:right

A row has a column `prompt`: a text, or a list of messages. All other columns reach the functions, which may be written
for TRL, for verl or for Cohort (`cohort.tasks.rewards`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from cohort.errors import TaskError
from cohort.tasks.base import require, task
from cohort.tasks.formats import RawRow
from cohort.tasks.grading import is_async
from cohort.tasks.places import locate_rows
from cohort.tasks.rewards import RewardFunction, make_score_group, read_reward_functions
from cohort.tasks.source import is_without_test_rows, read_sources
from cohort.types import Answer, Message, Row
from cohort.user_code import load_function, make_function_spec, make_spec_absolute, split_spec


@task("rows")
class Rows:
    """Prompts of a file, scored by functions of yours."""

    data: str = ""
    """The rows: a file (.jsonl, .json, .csv, .parquet), or owner/name on the hub. With {split} in its name there is one
    file to train on and one to test; without it, all rows are trained on."""
    columns: tuple[str, ...] = ()
    """Columns that have another name in `data`, as in prompt=question."""
    rewards: tuple[str, ...] = ()
    """The reward functions, as file.py:function. Each is a part of the reward; --reward.NAME is its coefficient."""
    accuracy_part: str = ""
    """The function whose numbers, all 0 or 1, are the accuracy; empty = none: evaluations measure the mean reward."""
    completions: Literal["auto", "text", "messages"] = "auto"
    """What functions of TRL see: auto = texts where the prompt is a text, else messages."""
    ask_service: Literal["auto", "yes", "no"] = "auto"
    """Whether the functions wait for an outside service; auto = yes if one of them is async."""

    name: ClassVar[str]
    optional_parts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # A recipe in Python may give the functions themselves. Files are not run here: a run directory is opened
        # without running foreign code.
        specs = tuple(make_function_spec(f) if callable(f) else make_spec_absolute(f) for f in self.rewards)
        object.__setattr__(self, "rewards", specs)
        for spec in specs:
            require("rows", split_spec(spec) is not None, f'rewards like path/to/file.py:FUNCTION, not "{spec}"')
        names = self.parts
        require("rows", len(set(names)) == len(names), f"reward functions of different names, not {', '.join(names)}")
        known = not self.accuracy_part or self.accuracy_part in names
        require("rows", known, f"an accuracy_part among {', '.join(names)}, not {self.accuracy_part}")

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the functions."""
        return tuple(spec.rpartition(":")[2] for spec in self.rewards) or ("score",)

    @property
    def accuracy(self) -> str | None:
        """The function whose numbers are the accuracy; None = there is none."""
        return self.accuracy_part or None

    @property
    def is_async(self) -> bool:
        """Whether one of the functions is a coroutine."""
        return any(is_async(each.function) for each in self._functions)

    @property
    def service(self) -> bool:
        """Whether the functions wait for an outside service."""
        return self.is_async if self.ask_service == "auto" else self.ask_service == "yes"

    @property
    def grader_files(self) -> tuple[Path, ...]:
        """The files of the functions: code that scores."""
        return tuple(sorted({Path(spec.rpartition(":")[0]) for spec in self.rewards}))

    @cached_property
    def _functions(self) -> tuple[RewardFunction, ...]:
        """The functions, loaded from their files when they are first needed."""
        if not self.rewards:
            raise TaskError("rows needs reward functions: name them with --task.rewards file.py:FUNCTION")
        loaded = read_reward_functions("rows", [load_function(spec) for spec in self.rewards])
        # The part is called as the setting says, whatever the function calls itself.
        return tuple(replace(each, name=name) for name, each in zip(self.parts, loaded, strict=True))

    def load_functions(self) -> list[Any]:
        """Returns the reward functions, loaded from their files."""
        return [each.function for each in self._functions]

    def rows(self, split: str) -> Iterator[Row]:
        """Returns the rows of a split. Without {split} in the name of the file, or a test file, none is for testing."""
        if not self.data:
            raise TaskError("rows needs data: name a file with --task.data, as in --task.data questions.jsonl")
        has_test = "{split}" in self.data
        if (split == "test" and not has_test) or is_without_test_rows("rows", split, self.data):
            return iter(())
        find_test = (lambda: locate_rows(self.data, "test")) if has_test and split == "train" else None
        return read_sources(
            "rows",
            locate_rows(self.data, split),
            find_test,
            columns=self.columns,
            make=self._make_row,
            key="prompt",
        )

    def _make_row(self, raw: RawRow) -> Row:
        """Returns a raw row, whose prompt must be a text or a list of messages. Raises ValueError for another one.

        Raises KeyError if a reward function needs a column that the row does not have.
        """
        prompt = raw["prompt"]
        is_messages = isinstance(prompt, list) and all(isinstance(m, dict) and "role" in m for m in prompt)
        if not (isinstance(prompt, str) and prompt.strip()) and not (is_messages and prompt):
            raise ValueError("prompt must be a text that is not empty, or a list of messages with role and content")
        for each in self._functions if self.rewards else ():
            # A row without an id gets one.
            if missing := each.find_missing_column({"id": "", **raw}):
                raise KeyError(missing)
        return dict(raw)

    def prompt(self, row: Row) -> list[Message] | str:
        """Returns the prompt of a row: a text, or messages."""
        prompt: list[Message] | str = row["prompt"]
        return prompt

    def score_group(self, row: Row, answers: list[Answer]) -> Any:
        """Scores the answers of a group with the functions; a coroutine, if one of them is one."""
        return make_score_group(self._functions, self.completions)(self, row, answers)
