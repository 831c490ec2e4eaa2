"""Assertions that are judged outside the sandbox: which ones, and that they mean what Python means."""

from __future__ import annotations

import pytest

from cohort.sandbox.driver import decode_value
from cohort.tasks.code.assertions import parse_assertion

# Assertions about a function f, with what f may return so that they hold, and so that they do not.
JUDGED = [
    ("assert f(1) == 2", 2, 3),
    ("assert f(1) == 2, 'a message'", 2, 3),
    ("assert f(1, b='x') != 2", 3, 2),
    ("assert f()", [1], []),
    ("assert not f()", 0, 1),
    ("assert f() is None", None, 0),
    ("assert f() is True", True, 1),
    ("assert f() == True", 1, 2),
    ("assert f() in (1, 2)", 2, 3),
    ("assert 'a' not in f()", "bcd", "abc"),
    ("assert 1 < f() <= 3", 3, 4),
    ("assert abs(f(2.5) - 0.5) < 1e-6", 0.5, 0.6),
    ("assert math.isclose(f(), math.pi, rel_tol=1e-3)", 3.1416, 3.2),
    ("assert sorted(f([3, 1])) == [1, 3]", [3, 1], [3]),
    ("assert set(f()) == {1, 2}", [2, 1, 1], [1]),
    ("assert f()[0] == 'x' and f()[-1:] == ['z']", ["x", "z"], ["x", "y"]),
    ("assert len(f('a' * 10)) == 2 ** 3 + 2", [0] * 10, []),
    ("assert isinstance(f(), (list, tuple))", (), {}),
    ("assert f() == {'a': (1, [2.5]), 3: None}", {"a": (1, [2.5]), 3: None}, {"a": (1, (2.5,)), 3: None}),
    ("assert (f() if 1 else 0) == -1", -1, 1),
    ("assert round(f(), 2) == 0.33", 1 / 3, 0.5),
    ("assert f() == f()", "same", float("nan")),
    ("assert f() == list(range(3))", [0, 1, 2], [0, 1]),
    ("assert str(f()) == '5' or f() == 6", 5, 7),
]


@pytest.mark.parametrize(("text", "right", "wrong"), JUDGED, ids=[text for text, _, _ in JUDGED])
def test_judged_as_python_does(text: str, right: object, wrong: object) -> None:
    assertion = parse_assertion(text)
    for value in (right, wrong):
        assert assertion.holds([value] * len(assertion.calls)) == (value is right)
        names = {"f": lambda *_, value=value, **__: value}
        try:
            exec(f"import math\n{text}", names)
            assert value is right
        except AssertionError:
            assert value is wrong


def test_calls_have_their_arguments() -> None:
    [call] = parse_assertion("assert f([1, (2,)], 4 if 0 else len('abc'), key={'k'}) == 1").calls
    assert call["function"] == "f"
    assert [decode_value(a) for a in call["arguments"]] == [[1, (2,)], 3]
    assert decode_value(call["keywords"]["key"]) == {"k"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("f(1) == 2", "not an assert"),
        ("assert f(1) == 2; assert f(2) == 3", "not one statement"),
        ("assert f(", "not one statement"),
        ("assert 1 == 1", "calls no function"),
        ("assert f(g(1)) == 2", "argument of another"),
        ("assert f(x) == 2", "no plain value"),
        ("assert f(*[1]) == 2", "no plain value"),
        ("assert f(**{'a': 1}) == 2", "not written out"),
        ("assert f(1) == x", "it uses x"),
        ("assert f(1).lower() == 'a'", "it calls f(1).lower"),
        ("assert Point(1).x == 1", "it uses Point(1).x"),
        ("assert [f(i) for i in (1, 2)] == [1, 2]", "no plain value"),
        ("assert all(x for x in f())", "not computed"),
        ("assert (lambda: f())() == 1", "it calls"),
        ("assert f() << 3 == 8", "operator"),
        ("assert f(9 ** 9 ** 9) == 1", "too large"),
        ("assert f('a' * 10 ** 9) == 1", "too large"),
        ("assert f(list(range(10 ** 9))) == 1", "too large"),
        ("assert f(" + "-" * 100_000 + "1) == 1", "not one statement"),
    ],
)
def test_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_assertion(text)
    assert reason in str(raised.value)


def test_a_function_may_have_the_name_of_one_of_python() -> None:
    assert parse_assertion("assert sum(10, 15) == 6", frozenset({"sum"})).calls[0]["function"] == "sum"
    with pytest.raises(ValueError, match="calls no function"):
        parse_assertion("assert sum([10, 15]) == 25")


@pytest.mark.parametrize(
    "value", [10**9, "x", None, [1], float("inf"), {}, 2**200_000], ids=lambda value: type(value).__name__
)
def test_hostile_values_fail_quickly(value: object) -> None:
    for text in (
        "assert [0] * f() == [1]",
        "assert 2 ** f() == 1",
        "assert len(range(f())) == -1",
        "assert 1 / f() == 3",
    ):
        assert not parse_assertion(text).holds([value])


def test_a_value_that_is_nested_deeply() -> None:
    value: list[object] = []
    for _ in range(5000):
        value = [value]
    other: list[object] = []
    for _ in range(5000):
        other = [other]
    assert not parse_assertion("assert f() == f()").holds([value, other])
