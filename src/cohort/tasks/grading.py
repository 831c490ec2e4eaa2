"""Calls of a task's grader: `score` for one answer, or `score_group` for all answers of a group together.

Both may be coroutines. Every result is checked here, so that a grader's mistake is never taken for a score.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cohort.errors import TaskError
from cohort.tasks.base import Task, make_outcome
from cohort.tasks.calls import resolve_row
from cohort.types import Answer, Outcome, Row


def scores_groups(task: Any) -> bool:
    """Returns whether a task scores the answers of a group together."""
    return callable(getattr(task, "score_group", None))


def is_async(function: Any) -> bool:
    """Returns whether a function, or an object that can be called, is declared with `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def grade(task: Task, row: Row, answer: Answer) -> Outcome:
    """Scores one answer with the task's grader, in this process, and returns its parts and reason as an outcome.

    An answer of a task that scores groups is a group of its own. Raises TaskError if the parts are not valid, and
    whatever the grader raises. Runs use the worker processes of a scoring pool instead.
    """
    own, own_row = resolve_row(task, row)
    if own is not task:
        return _rename(task, row, grade(own, own_row, answer))
    return asyncio.run(grade_async(task, row, answer)) if has_async_grader(task) else _grade_now(task, row, answer)


def grade_group(task: Any, row: Row, answers: Sequence[Answer]) -> list[Outcome]:
    """Scores the answers of a group together, in this process. Raises like `grade`.

    In a mixture, the answers to a task that scores them one by one are scored so.
    """
    own, own_row = resolve_row(task, row)
    if own is not task:
        together = scores_groups(own)
        outcomes = grade_group(own, own_row, answers) if together else [grade(own, own_row, a) for a in answers]
        return [_rename(task, row, outcome) for outcome in outcomes]
    scored = task.score_group(row, list(answers))
    if inspect.isawaitable(scored):
        scored = asyncio.run(_wait_for(scored))
    return make_group_outcomes(task, row, len(answers), scored)


async def grade_async(task: Task, row: Row, answer: Answer) -> Outcome:
    """Does what `grade` does, and waits for a grader that is a coroutine."""
    own, own_row = resolve_row(task, row)
    if own is not task:
        if not has_async_grader(own):
            # Other answers go on being scored while a grader that is no coroutine works.
            return _rename(task, row, await asyncio.to_thread(_grade_now, own, own_row, answer))
        return _rename(task, row, await grade_async(own, own_row, answer))
    if scores_groups(task):
        return (await grade_group_async(task, row, [answer]))[0]
    scored: Any = task.score(row, answer)
    return make_outcome(task, row, await scored if inspect.isawaitable(scored) else scored)


async def grade_group_async(task: Any, row: Row, answers: Sequence[Answer]) -> list[Outcome]:
    """Does what `grade_group` does, and waits for a grader that is a coroutine."""
    own, own_row = resolve_row(task, row)
    if own is not task:
        if not scores_groups(own):
            return list(await asyncio.gather(*(grade_async(task, row, answer) for answer in answers)))
        return [_rename(task, row, outcome) for outcome in await grade_group_async(own, own_row, answers)]
    scored = task.score_group(row, list(answers))
    return make_group_outcomes(task, row, len(answers), await scored if inspect.isawaitable(scored) else scored)


def make_group_outcomes(task: Task, row: Row, num_answers: int, scored: Any) -> list[Outcome]:
    """Returns what `score_group` returned as outcomes. Raises TaskError unless it has one valid result per answer."""
    where = f'task "{task.name}", row "{row.get("id", "?")}": the method `score_group`'
    if isinstance(scored, str | bytes | dict) or not isinstance(scored, Sequence):
        raise TaskError(f"{where} returned a {type(scored).__name__}; return a list with one result per answer")
    if len(scored) != num_answers:
        raise TaskError(f"{where} returned {len(scored)} results for {num_answers} answers; return one per answer")
    return [make_outcome(task, row, result) for result in scored]


def _rename(task: Any, row: Row, outcome: Outcome) -> Outcome:
    """Returns the outcome of a task in a mixture with the names that the mixture has for its parts."""
    return replace(outcome, parts=task.rename_parts(row, outcome.parts))


def has_async_grader(task: Any) -> bool:
    """Returns whether the grader of a task is a coroutine. A task whose method hides it says so by `is_async`."""
    hidden: bool | None = getattr(task, "is_async", None)
    return is_async(task.score_group if scores_groups(task) else task.score) if hidden is None else hidden


def _grade_now(task: Task, row: Row, answer: Answer) -> Outcome:
    """Scores one answer with a grader that is no coroutine."""
    if scores_groups(task):
        return grade_group(task, row, [answer])[0]
    scored: Any = task.score(row, answer)
    # A plain function may return a coroutine.
    return make_outcome(task, row, asyncio.run(_wait_for(scored)) if inspect.isawaitable(scored) else scored)


async def _wait_for(result: Any) -> Any:
    """Returns the result of anything that can be awaited; `asyncio.run` takes coroutines only."""
    return await result
