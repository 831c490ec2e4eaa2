"""No answer passes the tests of a row by anything but right results."""

from __future__ import annotations

import pytest

from cohort.sandbox import run
from cohort.tasks.base import make_plain_answer
from cohort.tasks.code.rows import make_row
from cohort.tasks.code.task import Code
from cohort.tasks.grading import grade
from cohort.types import Row
from tests.unit.tasks.code.tampering import TAMPERING

VALUES = {n: n * n + 7919 for n in (0, 3, 11)}
RIGHT = "def f(n):\n    return n * n + 7919"
RIGHT_PRINTED = f"{RIGHT}\nprint(f(int(input())))"
# The same tests in their three forms, and asserts with all that surrounds a call.
TESTS = {
    "calls": [{"function": "f", "arguments": [n], "expected": value} for n, value in VALUES.items()],
    "asserts": [f"assert f({n}) == {value}" for n, value in VALUES.items()],
    "around": [f"assert abs(f({n}) - {value}) < 1e-6 and isinstance(f({n}), int)" for n, value in VALUES.items()],
    "inputs": [{"input": f"{n}\n", "output": f"{value}\n"} for n, value in VALUES.items()],
}


def row_of(kind: str) -> Row:
    return make_row({"id": "r", "prompt": "p", "tests": TESTS[kind], "solution": RIGHT}, "refuse")


@pytest.mark.parametrize("kind", TESTS)
@pytest.mark.parametrize("name", TAMPERING)
def test_tampering_fails(name: str, kind: str) -> None:
    source = TAMPERING[name]
    if kind == "inputs":
        source += "\nprint(f(int(input())))"
    outcome = grade(Code(seconds=1.0), row_of(kind), make_plain_answer(f"```python\n{source}\n```"))
    assert outcome.parts == {"correct": 0.0, "passed": 0.0} and outcome.reason, (name, kind, outcome)


@pytest.mark.parametrize("kind", TESTS)
def test_a_right_program_passes_the_same_tests(kind: str) -> None:
    source = RIGHT_PRINTED if kind == "inputs" else RIGHT
    assert grade(Code(), row_of(kind), make_plain_answer(source)).parts == {"correct": 1.0, "passed": 1.0}


@pytest.mark.parametrize("kind", TESTS)
def test_nothing_that_is_expected_reaches_the_sandbox(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes that go there: program, input and calls."""
    sent: list[object] = []
    real = run._run

    def record(source: str, stdin: bytes, later: bytes, *rest: object, **options: object) -> object:
        sent.append((stdin, later))
        return real(source, stdin, later, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "_run", record)
    grade(Code(), row_of(kind), make_plain_answer("def f(n):\n    return 1"))
    assert sent and not [value for value in VALUES.values() if str(value) in str(sent)]


@pytest.mark.parametrize("name", ["exits", "exits-at-once", "exits-in-the-call", "equals-everything", "writes-results"])
def test_trusted_statements_withstand_simple_tampering(name: str) -> None:
    """Such tests run in the program's process: the simple tricks fail, but the next test shows one that does not."""
    statements = ["for n, v in {0: 7919, 3: 7928}.items():\n    assert type(f(n)) is int and f(n) == v"]
    row = make_row({"id": "r", "prompt": "p", "tests": statements, "solution": RIGHT}, "trusted")
    assert grade(Code(asserts="trusted"), row, make_plain_answer(RIGHT)).parts["correct"] == 1
    outcome = grade(Code(asserts="trusted"), row, make_plain_answer(TAMPERING[name]))
    assert outcome.parts["correct"] == 0, outcome


def test_trusted_statements_can_be_cheated() -> None:
    """This is why they are refused unless a user trusts them; the documentation says so."""
    row = make_row({"id": "r", "prompt": "p", "tests": ["for n in (1,):\n    assert f(n) == 7920"]}, "trusted")
    cheat = "import sys\nsys.modules['__main__'].do_call = lambda *_: {'value': True}"
    assert grade(Code(asserts="trusted"), row, make_plain_answer(cheat)).parts["correct"] == 1
