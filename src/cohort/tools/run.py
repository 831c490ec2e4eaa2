"""Runs calls of tools: within a time limit, with an outcome that is counted and a text that the model is shown."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType
from typing import Any

from cohort.tools.formats import Call
from cohort.tools.schema import Tool


class CallOutcome(StrEnum):
    """How a call of a tool ended. A worker that dies in a call is a failure of the sample, counted as "crash"."""

    OK = "ok"
    ERROR = "error"  # the tool raised an exception
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"  # there is no such tool
    MALFORMED = "malformed"  # the call cannot be read, or its arguments do not fit


@dataclass(frozen=True, kw_only=True, slots=True)
class CallResult:
    """The outcome of a call and the text that the model is shown."""

    name: str
    outcome: CallOutcome
    content: str


REPEAT_SECONDS = 0.1  # between two alarms, once the time of a tool is up


class _TimeLimitError(BaseException):
    """Raised inside a tool whose time is up. No `except Exception` of the tool catches it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLimits:
    """Limits of the calls of one message."""

    seconds: float  # for all calls of the message together
    characters: int  # of one result; the rest is cut


def run_calls(calls: Sequence[Call], tools: Mapping[str, Tool], limits: CallLimits) -> list[CallResult]:
    """Runs the calls of a message one after the other, and returns their results in order."""
    deadline = time.monotonic() + limits.seconds
    return [_run_call(call, tools, limits, deadline) for call in calls]


def _run_call(call: Call, tools: Mapping[str, Tool], limits: CallLimits, deadline: float) -> CallResult:
    """Runs one call, which must end by `deadline`, and returns its result."""
    outcome, text = _find_outcome(call, tools, deadline)
    # The model chose the name and the arguments, which may be quoted in the text.
    return CallResult(name=_clean(call.name, 64), outcome=outcome, content=_clean(text, limits.characters))


def _find_outcome(call: Call, tools: Mapping[str, Tool], deadline: float) -> tuple[CallOutcome, str]:
    """Runs one call, which must end by `deadline`. Returns the outcome and the text for the model, as they are."""
    tool = tools.get(call.name)
    if call.problem:
        return CallOutcome.MALFORMED, f"Malformed call: {call.problem}."
    if tool is None:
        known = ", ".join(tools) or "none"
        return CallOutcome.UNKNOWN, f'There is no tool "{call.name}". Tools: {known}.'
    try:
        arguments = tool.check_arguments(call.arguments)
    except ValueError as error:
        return CallOutcome.MALFORMED, f"Malformed call: {error}."
    return _call_function(tool, arguments, deadline)


def _call_function(tool: Tool, arguments: dict[str, Any], deadline: float) -> tuple[CallOutcome, str]:
    """Calls the function of a tool. Returns the outcome, and the text of its result or of what it raised."""
    try:
        with _stop_at(deadline):
            found = tool.function(**arguments)
            # An `async def` tool has returned a coroutine, which is run to its end.
            return CallOutcome.OK, _to_text(asyncio.run(found) if inspect.iscoroutine(found) else found)
    except _TimeLimitError:
        return CallOutcome.TIMEOUT, "The tool took too long and was stopped."
    # Whatever a tool raises is shown to the model: the call was the model's own. That includes exit(), by which a model
    # that may run code would otherwise leave the baseline.
    except BaseException as error:
        return CallOutcome.ERROR, f"{type(error).__name__}: {_describe(error)}"


def _describe(error: BaseException) -> str:
    """Returns the text of an exception; "" if it has none that can be made."""
    try:
        return str(error)
    except Exception:
        return ""


@contextmanager
def _stop_at(deadline: float) -> Iterator[None]:
    """Raises _TimeLimitError inside the block once the deadline (`time.monotonic`) has passed.

    Outside the main thread, where signals cannot be handled, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        """Ends the call."""
        raise _TimeLimitError

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, stop)
    try:
        # Again and again, because a tool may catch the first one.
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, deadline - time.monotonic()), REPEAT_SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _to_text(value: Any) -> str:
    """Returns what a tool returned as text: JSON for lists and dicts, nothing for None.

    >>> _to_text([1, "a"]), _to_text(None), _to_text(2.0), _to_text(b"\\xff")
    ('[1, "a"]', '', '2.0', '\\ufffd')
    """
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _clean(text: str, limit: int) -> str:
    """Returns a text that can be encoded, of at most `limit` characters, with a note at its end if it was longer."""
    note = f" ... (cut after {limit} characters)" if len(text) > limit else ""
    # Half of a character has no tokens.
    return text[:limit].encode("utf-8", "replace").decode("utf-8") + note
