"""Running calls: every outcome with the text that the model is shown, time limits, and results of any kind."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cohort.tools.formats import Call
from cohort.tools.run import CallLimits, CallOutcome, run_calls
from cohort.tools.schema import make_tools

LIMITS = CallLimits(seconds=5.0, characters=40)


def echo(text: str) -> str:
    """Says it again."""
    return text


def fail(text: str) -> str:
    """Fails."""
    raise ValueError(f"no {text}")


def wait(seconds: float) -> str:
    """Waits."""
    time.sleep(seconds)
    return "done"


def stubborn() -> str:
    """Catches everything that it should not."""
    try:
        time.sleep(60)
    except Exception:
        return "caught"
    return "done"


RETURNED: list[Any] = [None]


def give() -> Any:
    """Gives."""
    return RETURNED[0]


def leave() -> str:
    """Leaves, as code that a model wrote may."""
    raise SystemExit(3)


def deaf() -> str:
    """Catches everything, again and again."""
    while True:
        try:
            time.sleep(60)
        except BaseException:
            if time.monotonic() > END[0]:
                raise


END = [0.0]
TOOLS = make_tools([echo, fail, wait, stubborn, give, leave, deaf])


def run(*calls: Call, limits: CallLimits = LIMITS) -> list[tuple[str, str]]:
    return [(str(result.outcome), result.content) for result in run_calls(calls, TOOLS, limits)]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (Call(name="echo", arguments={"text": "error"}), ("ok", "error")),
        (Call(name="fail", arguments={"text": "luck"}), ("error", "ValueError: no luck")),
        (Call(name="nothing"), ("unknown", 'There is no tool "nothing". Tools: echo, ... (cut after 40 characters)')),
        (Call(name="\ud800"), ("unknown", 'There is no tool "?". Tools: echo, fail, ... (cut after 40 characters)')),
        (Call(name="leave"), ("error", "SystemExit: 3")),
        (Call(name="echo"), ("malformed", 'Malformed call: the argument "text" is m ... (cut after 40 characters)')),
        (Call(problem="it is no JSON"), ("malformed", "Malformed call: it is no JSON.")),
        (Call(name="echo", arguments={"text": "x" * 50}), ("ok", "x" * 40 + " ... (cut after 40 characters)")),
        (Call(name="echo", arguments={"text": "a\ud800b"}), ("ok", "a?b")),
    ],
)
def test_each_outcome_has_its_text(made: Call, expected: tuple[str, str]) -> None:
    assert run(made) == [expected]


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, ""),
        (3, "3"),
        (0.5, "0.5"),
        (True, "True"),
        ({"a": [1, "ä"]}, '{"a": [1, "ä"]}'),
        (b"\xff\x00", "\ufffd\x00"),
    ],
)
def test_results_of_any_kind_are_texts(returned: Any, text: str) -> None:
    RETURNED[0] = returned
    assert run(Call(name="give")) == [("ok", text)]


def test_a_tool_that_takes_too_long_is_stopped_and_the_next_call_has_what_is_left() -> None:
    begin = time.monotonic()
    limits = CallLimits(seconds=0.2, characters=100)
    slow = Call(name="wait", arguments={"seconds": 30})
    found = run(Call(name="echo", arguments={"text": "a"}), slow, slow, limits=limits)
    assert [outcome for outcome, _ in found] == ["ok", "timeout", "timeout"]
    assert found[1][1] == "The tool took too long and was stopped."
    assert time.monotonic() - begin < 5
    # No timer is left behind.
    time.sleep(0.25)
    assert run(Call(name="echo", arguments={"text": "a"})) == [("ok", "a")]


def test_a_tool_that_catches_every_exception_is_stopped_too() -> None:
    begin = time.monotonic()
    assert run(Call(name="stubborn"), limits=CallLimits(seconds=0.1, characters=9))[0][0] == str(CallOutcome.TIMEOUT)
    assert time.monotonic() - begin < 5


def test_calls_are_run_in_their_order() -> None:
    RETURNED[0] = 1
    made = [Call(name="give"), Call(name="echo", arguments={"text": "b"}), Call(name="give")]
    assert [text for _, text in run(*made)] == ["1", "b", "1"]


def test_a_tool_that_catches_the_alarm_is_woken_again() -> None:
    begin = time.monotonic()
    END[0] = begin + 0.5
    assert run(Call(name="deaf"), limits=CallLimits(seconds=0.1, characters=9))[0][0] == str(CallOutcome.TIMEOUT)
    assert time.monotonic() - begin < 5


async def fetch(text: str, forever: bool = False) -> str:
    """Returns a text after it has given way to others once."""
    await asyncio.sleep(0)
    while forever:
        await asyncio.sleep(0)
    if text == "bad":
        raise ValueError("no luck")
    return text.upper()


def test_async_tools_are_run_to_their_end() -> None:
    tools = make_tools([fetch])
    calls = [Call(name="fetch", arguments={"text": text}) for text in ("a", "bad", "b")]
    found = [(str(r.outcome), r.content) for r in run_calls(calls, tools, LIMITS)]
    assert found == [("ok", "A"), ("error", "ValueError: no luck"), ("ok", "B")]
    stuck = Call(name="fetch", arguments={"text": "a", "forever": True})
    limits = CallLimits(seconds=0.1, characters=9)
    assert [str(r.outcome) for r in run_calls([stuck], tools, limits)] == ["timeout"]
    assert [r.content for r in run_calls(calls[:1], tools, LIMITS)] == ["A"]
