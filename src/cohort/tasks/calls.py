"""Calls of a task's methods. What they return is checked where it comes in, and what they raise is the user's error."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from cohort.errors import TaskError
from cohort.tasks.formats import has_half_character
from cohort.types import Message, Row
from cohort.user_code import describe_result, report_errors

if TYPE_CHECKING:
    from cohort.tasks.base import Task


def is_mixture(task: Any) -> bool:
    """Returns whether the rows of a task belong to other tasks."""
    return hasattr(task, "for_row")


def resolve_row(task: Any, row: Row) -> tuple[Any, Row]:
    """Returns the task that a row belongs to, and the row as that task knows it: a mixture has rows of other tasks.

    Any other task is returned itself, with the row unchanged.
    """
    return task.for_row(row) if is_mixture(task) else (task, row)


def get_label(task: Any, row: Row) -> str:
    """Returns the name under which a row's prompts are known: its task's label in a mixture, or the task's name."""
    label: str = task.get_label(row) if hasattr(task, "get_label") else task.name
    return label


def iterate_rows(task: Task, split: str) -> Iterator[Any]:
    """Yields what the task's method `rows` gives for a split, unchecked.

    Raises TaskError if it returns nothing that can be iterated, and UserCodeError if that of a user's task raises.
    """
    with report_errors(f'the method rows of the task "{task.name}"', type(task)):
        rows: Any = task.rows(split)
    if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
        raise TaskError(
            f'task "{task.name}": its method `rows` returned {describe_result(rows, type(task).rows)} for "{split}"; '
            "it must yield dicts, or return a list of them"
        )
    with report_errors(f'the method rows of the task "{task.name}"', type(task)):
        yield from rows


def quote_id(id: Any) -> str:
    """Returns the id of a row in quotes, for messages: in ASCII, at most 80 characters.

    >>> quote_id("caf\u00e9")
    '"caf\\\\xe9"'
    """
    return f'"{ascii(str(id))[1:-1][:80]}"'


def describe_columns(row: Row) -> str:
    """Returns the names of a row's columns, for messages: in ASCII, at most 200 characters.

    >>> describe_columns({"id": "0", "question": "?"})
    'columns: id, question'
    """
    return f"columns: {ascii(', '.join(map(str, row)))[1:-1][:200]}"


def call_prompt(task: Task, row: Row, number: str = "") -> Any:
    """Returns what the task's method `prompt` returns for a row, unchecked; a text as one message of the user.

    `number` says which row it is, such as "row 17 of train", for the message. Raises UserCodeError if the method of a
    user's task raises.
    """
    task, row = resolve_row(task, row)
    about = "; ".join(text for text in (number, describe_columns(row)) if text)
    what = f'the method prompt of the task "{task.name}", for row {quote_id(row["id"])} ({about}),'
    with report_errors(what, type(task)):
        prompt: Any = task.prompt(row)
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def make_messages(task: Task, row: Row) -> list[Message]:
    """Returns the messages of a row's prompt as plain JSON values.

    Raises TaskError if the method `prompt` returns no list of messages that can be written as JSON and as text, and
    UserCodeError if that of a user's task raises.
    """
    task, row = resolve_row(task, row)
    return check_messages(call_prompt(task, row), f"{_name_row(task, row)}: the method `prompt`", type(task).prompt)


def _name_row(task: Task, row: Row) -> str:
    """Returns the task and the row, for messages."""
    return f'task "{task.name}", row {quote_id(row["id"])}'


def check_messages(messages: Any, what: str, method: Any) -> list[Message]:
    """Returns the messages that a method of a user's code returned as plain JSON values.

    `what` names the method at the beginning of messages. Raises TaskError for anything but a list of messages that can
    be written as JSON and as text.
    """
    got = describe_result(None, method) if messages is None else str(messages)[:60]
    if not isinstance(messages, list) or not messages or not all(_is_message(m) for m in messages):
        raise TaskError(
            f"{what} must return a list of one or more dicts, each with a string as "
            f'"role", not {got}. Write [{{"role": "user", "content": TEXT}}]'
        )
    try:
        # Rollout files hold the messages as JSON; a prompt must be the same before and after it was stored.
        text = json.dumps(messages)
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(
            f"{what} returned messages that cannot be written as JSON ({error}); use only strings, numbers, lists and "
            "dicts in them"
        ) from error
    if has_half_character(text):
        raise TaskError(
            f"{what} returned messages that contain half a character (a lone surrogate), which cannot be written as "
            "text; remove it"
        )
    plain: list[Message] = json.loads(text)
    return plain


def _is_message(message: Any) -> bool:
    """Returns whether the value is a dict whose "role" is a text."""
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def get_gold(task: Any, row: Row) -> str | None:
    """Returns a right answer to a row as text; None if the task has no method `gold`.

    Raises TaskError if it is no text, and UserCodeError if the `gold` of a user's task raises.
    """
    task, row = resolve_row(task, row)
    gold = getattr(task, "gold", None)
    if gold is None:
        return None
    what = f'the method gold of the task "{task.name}", for row {quote_id(row["id"])} ({describe_columns(row)}),'
    with report_errors(what, type(task)):
        text = gold(row)
    if not isinstance(text, str):
        raise TaskError(
            f'task "{task.name}", row {quote_id(row["id"])}: its method `gold` returned '
            f"{describe_result(text, type(task).gold)}; return a right answer as text"
        )
    return text


def compute_summary(task: Any, rows: Sequence[Row], parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the further numbers of an evaluation that the task's method `summary` computes; {} without that method.

    `rows` and `parts` have one entry per scored answer. Raises TaskError if the result is no dict of finite numbers,
    and UserCodeError if the `summary` of a user's task raises.
    """
    summary = getattr(task, "summary", None)
    if summary is None or not rows:
        return {}
    with report_errors(f'the method summary of the task "{task.name}"', type(task)):
        found = summary(rows, parts)
    is_dict = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
    if not is_dict or not all(isinstance(value, Real) and math.isfinite(value) for value in found.values()):
        raise TaskError(
            f'task "{task.name}": its method `summary` returned {ascii(found)[:60]}; return a dict of finite numbers '
            "by name"
        )
    return {name: float(value) for name, value in found.items()}
