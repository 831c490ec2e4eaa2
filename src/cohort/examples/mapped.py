"""A user's function that makes an example of a raw row (`--data.map file.py:function`), and what it may return."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from cohort.errors import TaskError
from cohort.system.json_text import parse_json
from cohort.tasks.formats import RawRow, has_half_character
from cohort.types import Message
from cohort.user_code import describe_result, load_function, report_errors


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Two answers to one prompt, of which `chosen` is better, as a user's function returns it.

    Prompt and answers are texts or lists of messages. A prompt of several messages is a conversation that goes on.
    """

    prompt: str | list[Message]
    chosen: str | list[Message]
    rejected: str | list[Message]
    system: str = ""  # put before the prompt if that has no system message
    tools: list[Any] | None = None  # descriptions of tools that the prompt offers


def load_map(spec: str, record: type[Any]) -> Callable[[RawRow, str], RawRow | None]:
    """Returns a function from a raw row and its place to a row in a format of ours; None = the row is left out.

    `spec` names the user's function as `file.py:function`; its file is run. `record` is the class that it may return
    besides a dict, `Preference` or `Conversation`. The result raises UserCodeError, which names the row's place, if the
    function raises, and TaskError if it returns anything else.
    """
    function = load_function(spec)
    name = spec.rpartition(":")[2]

    def convert(row: RawRow, place: str) -> RawRow | None:
        with report_errors(f"the function {name} (--data.map), for {place},", function):
            made = function(row)
        if made is None:
            return None
        if isinstance(made, record):
            made = {f.name: value for f in fields(made) if (value := getattr(made, f.name))}
        if not isinstance(made, Mapping):
            raise TaskError(
                f"{place}: the function {name} (--data.map) returned {describe_result(made, function)}; return "
                f"cohort.{record.__name__}(...), a dict with the same names, or None to leave the row out"
            )
        return _make_plain(dict(made), f"{place}: what the function {name} (--data.map) returned")

    return convert


def _make_plain(made: dict[Any, Any], subject: str) -> RawRow:
    """Returns a row of a user's function as plain JSON values. Raises TaskError, which begins with `subject`."""
    try:
        text = json.dumps(made)
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(
            f"{subject} cannot be written as JSON ({error}); use only strings, numbers, lists and dicts"
        ) from error
    if has_half_character(text):
        raise TaskError(f"{subject} contains half a character (a lone surrogate); remove it")
    plain: RawRow = parse_json(text)
    return plain
