"""What a task is: rows, a prompt for each, and a score for an answer.

A task is a class under `@cohort.task("name")`. It becomes a frozen dataclass whose fields are its knobs, so
that an instance is a complete, comparable and printable description of the data it makes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from typing import Any, ClassVar, Protocol, TypeVar, dataclass_transform

from cohort.errors import ConfigError, TaskError, nearest
from cohort.types import Answer, Message, Outcome, Row

T = TypeVar("T")

MAX_REASON = 500
USUAL_TOKENS = 256  # of a completion, where a task does not say how many it needs
OVER_LIMIT = "over the grader's work limit"  # the reason of an answer that is too much work to check
BUILT_IN = {
    "aime24": "cohort.tasks.mathematics.task",
    "amc": "cohort.tasks.mathematics.task",
    "arithmetic": "cohort.tasks.arithmetic",
    "countdown": "cohort.tasks.countdown",
    "gsm8k": "cohort.tasks.gsm8k",
    "ifeval": "cohort.tasks.ifeval.task",
    "math12k": "cohort.tasks.mathematics.task",
    "math500": "cohort.tasks.mathematics.task",
    "minerva": "cohort.tasks.mathematics.task",
    "olympiad": "cohort.tasks.mathematics.task",
}

_registry: dict[str, type] = {}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A score with the grader's reason for it; `score` may return one instead of a bare dict of parts."""

    parts: Mapping[str, float]
    reason: str = ""


class Task(Protocol):
    """What the decorator makes sure of. `gold(row) -> str` is optional: the self-check uses it."""

    name: ClassVar[str]
    accuracy: ClassVar[str]  # the part, 0 or 1, that evaluation reports
    parts: ClassVar[tuple[str, ...]]  # every part `score` returns, no more and no fewer
    work_seconds: ClassVar[float]
    """An answer on which the grader works longer than this, or for which it runs out of memory, is wrong: for graders
    whose work depends on the answer. 0 = no such promise: that is a failure of the grader."""
    max_tokens: ClassVar[int]  # what a completion may need, in evaluations that do not say
    packages: ClassVar[Mapping[str, str]]
    """Modules that grading imports beyond Cohort's own needs, and what to install for each: looked for when a scoring
    pool is made, imported by its workers before they take answers."""

    def rows(self, split: str) -> Iterable[Row]:
        """The items of a split ("train" or "test"), always the same ones in the same order."""

    def prompt(self, row: Row) -> list[Message]:
        """What the model is asked. May end with an assistant message it has to continue."""

    def score(self, row: Row, answer: Answer) -> Mapping[str, float] | Verdict:
        """Parts by name. What the answer got wrong is a low score; an exception is a bug in the grader."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def task(name: str) -> Callable[[type[T]], type[T]]:
    """Register a class as the task `name`.

    >>> @task("echo")
    ... class Echo:
    ...     word: str = "group"
    ...     def rows(self, split): yield {"word": self.word}
    ...     def prompt(self, row): return [{"role": "user", "content": row["word"]}]
    ...     def score(self, row, answer): return {"correct": float(answer.text == row["word"])}
    >>> get_task("echo")(word="cohort").accuracy
    'correct'
    """
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
        raise TaskError(f'task name "{name}" must be lower-case letters, digits, "_" or "-"')

    def register(cls: type[T]) -> type[T]:
        for method in ("rows", "prompt", "score"):
            if not callable(getattr(cls, method, None)):
                raise TaskError(f'task "{name}": class {cls.__name__} lacks the method {method}')
        if not dataclasses.is_dataclass(cls):
            cls = dataclass(frozen=True, kw_only=True)(cls)
        elif not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise TaskError(f'task "{name}": {cls.__name__} must be frozen; remove its @dataclass')
        accuracy = getattr(cls, "accuracy", "correct")
        parts = tuple(getattr(cls, "parts", (accuracy,)))
        if accuracy not in parts:
            raise TaskError(f'task "{name}": its accuracy "{accuracy}" is not among its parts {list(parts)}')
        work_seconds, packages = getattr(cls, "work_seconds", 0.0), dict(getattr(cls, "packages", {}))
        if not isinstance(work_seconds, int | float) or not 0 <= work_seconds < math.inf:
            raise TaskError(f'task "{name}": its work_seconds is {work_seconds!r}, not a number of seconds')
        vars_ = {"name": name, "accuracy": accuracy, "parts": parts, "_source": _source_file(cls)}
        max_tokens = getattr(cls, "max_tokens", USUAL_TOKENS)
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise TaskError(f'task "{name}": its max_tokens is {max_tokens!r}, not a number of at least 1')
        vars_ |= {"work_seconds": float(work_seconds), "packages": packages, "max_tokens": max_tokens}
        for key, value in vars_.items():
            setattr(cls, key, value)
        known = _registry.get(name) or (name in BUILT_IN and cls.__module__ != BUILT_IN[name])
        if known is True or (known and _origin(known) != _origin(cls)):
            raise TaskError(f'task "{name}" is already registered; choose another name')
        _registry[name] = cls
        return cls

    return register


def _source_file(cls: type) -> str:
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or ""


def _origin(cls: type) -> tuple[str, str]:
    return vars(cls)["_source"] or cls.__module__, cls.__qualname__


def get_task(name: str) -> type:
    """The registered class; its constructor takes the knobs."""
    if name not in _registry and name in BUILT_IN:
        importlib.import_module(BUILT_IN[name])
    if name not in _registry:
        raise ConfigError(f'unknown task "{name}".{nearest(name, task_names())}')
    return _registry[name]


def task_names() -> list[str]:
    """Built-in and registered tasks, sorted."""
    return sorted(_registry.keys() | BUILT_IN.keys())


def require(task: str, holds: bool, rule: str) -> None:
    """For the checks of a task's knobs: one line that names the task and the rule."""
    if not holds:
        raise TaskError(f"{task} needs {rule}")


def check_packages(task: Task) -> None:
    """Refuse a task whose grader's packages are not installed; they are looked for, not imported."""
    for module, source in task.packages.items():
        if importlib.util.find_spec(module) is None:
            raise TaskError(f"scoring {task.name} needs {module}, which is not installed: pip install '{source}'")


def load_rows(task: Task, split: str) -> list[Row]:
    """All rows of a split as plain JSON values, each with a distinct string id.

    A row without an id gets the hash of its content, so the id survives reordering of the data.
    """
    rows: list[Row] = []
    first: dict[str, int] = {}
    for index, given in enumerate(task.rows(split)):
        row = _as_json(task.name, index, given)
        if row["id"] in first:
            raise TaskError(
                f'task "{task.name}": rows {first[row["id"]]} and {index} of "{split}" have the same id '
                f'"{row["id"]}"; remove the repeated row or give each its own id'
            )
        first[row["id"]] = index
        rows.append(row)
    if not rows:
        raise TaskError(f'task "{task.name}" has no rows in its "{split}" split')
    return rows


def _as_json(name: str, index: int, given: Any) -> Row:
    """Through JSON and back, because the grader sees its row after that journey and the prompt should too."""
    if not isinstance(given, Mapping):
        raise TaskError(f'task "{name}": row {index} is a {type(given).__name__}, not a dict')
    try:
        row: Row = json.loads(json.dumps(dict(given)))
    except (TypeError, ValueError) as error:
        raise TaskError(f'task "{name}": row {index} cannot be written as JSON ({error})') from error
    identity = row.get("id")
    if identity is None:
        identity = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]
    elif isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise TaskError(f'task "{name}": row {index} has the id {identity!r}, not a non-empty string or an int')
    return {"id": str(identity), **{k: v for k, v in row.items() if k != "id"}}


def check_parts(name: str, row_id: str, declared: tuple[str, ...], accuracy: str, scored: Any) -> dict[str, float]:
    """A grader's parts as floats in declared order, or a TaskError naming task and row. Never a silent 0.

    >>> check_parts("t", "0", ("correct", "format"), "correct", {"format": 0.5, "correct": True})
    {'correct': 1.0, 'format': 0.5}
    """
    where = f'task "{name}", row "{row_id}"'
    if not isinstance(scored, Mapping):
        raise TaskError(f"{where}: score returned a {type(scored).__name__}, not a dict of parts or a Verdict")
    if scored.keys() != set(declared):
        missing = [part for part in declared if part not in scored]
        extra = [str(part) for part in scored if part not in declared]
        problem = f"lacks the part {missing[0]!r}" if missing else f"has the undeclared part {extra[0]!r}"
        raise TaskError(f"{where}: score {problem}; the task declares parts = {declared!r}")
    parts: dict[str, float] = {}
    for part in declared:
        value = scored[part]
        if not isinstance(value, Real):
            raise TaskError(f"{where}: part {part!r} is {str(value)[:40]!r}, not a number")
        try:
            parts[part] = float(value)
        except OverflowError:
            parts[part] = math.inf
        if not math.isfinite(parts[part]):
            raise TaskError(f"{where}: part {part!r} is {parts[part]}; a score is a finite number")
    if parts[accuracy] not in (0.0, 1.0):
        raise TaskError(f"{where}: part {accuracy!r}, the accuracy, is {parts[accuracy]}, not 0 or 1")
    return parts


def grade(task: Task, row: Row, answer: Answer) -> Outcome:
    """Score one answer in this process. Runs are graded behind the boundary of a ScoringPool instead."""
    scored = task.score(row, answer)
    verdict = scored if isinstance(scored, Verdict) else Verdict(scored)
    parts = check_parts(task.name, str(row.get("id", "?")), task.parts, task.accuracy, verdict.parts)
    return Outcome(parts=parts, reason=str(verdict.reason)[:MAX_REASON])


def plain_answer(text: str) -> Answer:
    """An answer that is only text: for self-checks, gold answers and tests."""
    return Answer(text=text, full=text, finish="stop", num_tokens=len(text.split()), conversation=[])


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """How many rows passed, and for how many of them the gold answer was among what was checked."""

    num_rows: int
    num_gold: int


def self_check(task: Task, num_rows: int = 20) -> SelfCheck:
    """Gold answers score full marks and an empty answer nothing, on the first rows of train and test."""
    gold = getattr(task, "gold", None)
    checked = 0
    for split in ("train", "test"):
        for index, given in enumerate(islice(task.rows(split), num_rows)):
            row = _as_json(task.name, index, given)
            where = f'task "{task.name}", row "{row["id"]}" of "{split}"'
            empty = grade(task, row, plain_answer(""))
            if empty.parts[task.accuracy] != 0 or max(empty.parts.values()) > 0:
                raise TaskError(f"{where}: an empty answer scores {empty.parts}; it must earn nothing")
            if gold is not None:
                text = gold(row)
                best = grade(task, row, plain_answer(text))
                if best.parts[task.accuracy] != 1:
                    raise TaskError(f"{where}: the gold answer {text!r} scores {best.parts} ({best.reason})")
            checked += 1
    if not checked:
        raise TaskError(f'task "{task.name}" has no rows to check')
    return SelfCheck(checked, checked if gold is not None else 0)
