"""Judging of programs: runs one against the tests of a row, and says which of them it passes.

Expected values never reach the program. It gets inputs and arguments, and what it returns is compared here. The one
exception are tests that are statements, which `--task.asserts trusted` allows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cohort.sandbox import ProgramLimits, ProgramResult, call_functions, run_program
from cohort.sandbox.driver import decode_value, encode_value
from cohort.tasks.code.assertions import parse_assertion

TOLERANCE = 1e-9  # of numbers with a point: relative and absolute; absolute alone where a whole number is expected
MAX_EXACT = 2**53  # above it numbers with a point are further apart than whole ones
MAX_SECONDS = 40.0  # by the clock, for all runs of one answer


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedProgram:
    """Which tests a program passes, and why it does not pass the first that it fails."""

    passed: tuple[bool, ...]
    reason: str = ""


def judge_program(
    source: str, tests: Sequence[dict[str, Any]], functions: frozenset[str], limits: ProgramLimits
) -> JudgedProgram:
    """Runs a program against tests. Tests that are calls have one run together, each input has one of its own.

    `functions` are names that the program is to define. After a run that was not done in time no other is begun: the
    tests that are left are failed. Raises SandboxError if a program could not be run.
    """
    deadline = time.monotonic() + MAX_SECONDS
    reasons: dict[int, str] = {}  # by number of the test: why it failed, "" = it passed
    called = [n for n, test in enumerate(tests) if "input" not in test]
    if called:
        done, said = _judge_calls(source, [tests[n] for n in called], functions, limits)
        reasons |= dict(zip(called, said, strict=True))
        deadline = 0.0 if done.outcome == "time" else deadline
    for number, test in enumerate(tests):
        if "input" not in test:
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            reasons[number] = "not run, because an earlier test took too long"
            continue
        done = run_program(source, test["input"], replace(limits, wall_seconds=min(limits.wall_seconds, left)))
        reasons[number] = done.explain() or ("" if is_same_output(test["output"], done.stdout) else "wrong output")
        deadline = 0.0 if done.outcome == "time" else deadline
    first = next((n for n in range(len(tests)) if reasons[n]), None)
    reason = "" if first is None else f"test {first + 1} of {len(tests)}: {reasons[first]}"
    return JudgedProgram(passed=tuple(not reasons[n] for n in range(len(tests))), reason=reason)


def _judge_calls(
    source: str, tests: Sequence[dict[str, Any]], functions: frozenset[str], limits: ProgramLimits
) -> tuple[ProgramResult, list[str]]:
    """Returns how a program ended that was called by tests, and for each test why it failed; "" = it passed."""
    calls = [_list_calls(test, functions) for test in tests]
    done = call_functions(source, [call for some in calls for call in some], limits)
    reasons = []
    results = iter(done.results)
    for test, some in zip(tests, calls, strict=True):
        own = [next(results) for _ in some]
        reasons.append(_find_fault(test, own, functions, done.explain() or "the program ended before the test"))
    return done, reasons


def _list_calls(test: dict[str, Any], functions: frozenset[str]) -> list[dict[str, Any]]:
    """Returns the calls that a test needs, for the sandbox."""
    if "statement" in test:
        return [{"statement": test["statement"]}]
    if "assert" in test:
        return list(parse_assertion(test["assert"], functions).calls)
    return [{"function": test["function"], "arguments": [encode_value(a) for a in test["arguments"]], "keywords": {}}]


def _find_fault(test: dict[str, Any], results: Sequence[Any], functions: frozenset[str], missing: str) -> str:
    """Returns why a test failed, "" if it passed. `missing` is the reason if there is no result."""
    values = []
    for result in results:
        if result is None:
            return missing
        if "value" not in result:
            return str(result.get("error", "no result"))[:200]
        try:
            values.append(decode_value(result["value"]))
        except ValueError as error:
            return f"a result that cannot be compared ({error})"
    if "statement" in test:
        return "" if values == [True] else "no result"
    if "assert" in test:
        return "" if parse_assertion(test["assert"], functions).holds(values) else f"{test['assert'][:150]} fails"
    return "" if is_same_value(test["expected"], values[0]) else "wrong result"


def is_same_value(expected: Any, value: Any) -> bool:
    """Returns whether a plain value is the expected one, which comes from JSON: a tuple is as good as a list.

    Types must agree otherwise: True is not 1. Numbers with a point may differ by TOLERANCE. If a whole number is
    expected, a larger difference than that is never allowed, however large the number.

    >>> is_same_value([1, 2.5], (1, 2.5)), is_same_value(1, True), is_same_value(0.3, 0.1 + 0.2)
    (True, False, True)
    >>> is_same_value(10**12, 1e12), is_same_value(10**12, 1e12 + 0.5), is_same_value(1e12, 1e12 + 0.5)
    (True, False, True)
    """
    try:
        return _is_same(expected, value)
    except RecursionError:
        return False


def _is_same(expected: Any, value: Any) -> bool:
    """Returns what `is_same_value` does. Raises RecursionError for values that are nested too deeply."""
    if isinstance(expected, list):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            return False
        return all(_is_same(one, other) for one, other in zip(expected, value, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or value.keys() != expected.keys():
            return False
        return all(_is_same(item, value[key]) for key, item in expected.items())
    numbers = (int, float)
    if type(expected) in numbers and type(value) in numbers:
        if type(expected) is int:
            # Python compares whole numbers with others exactly.
            is_near = abs(expected) < MAX_EXACT and abs(value - expected) <= TOLERANCE
            return bool(expected == value) or (type(value) is float and is_near)
        try:
            return math.isclose(expected, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        except OverflowError:
            return False
    return type(expected) is type(value) and bool(expected == value)


def is_same_output(expected: str, output: str) -> bool:
    """Returns whether two texts are the same but for spaces at the ends of lines and empty lines at the end.

    >>> is_same_output("1 2\\n3", "1 2 \\n3\\n\\n"), is_same_output("1 2", "1  2")
    (True, False)
    """
    return _trim(expected) == _trim(output)


def _trim(text: str) -> list[str]:
    """Returns the lines of a text without what `is_same_output` ignores."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
