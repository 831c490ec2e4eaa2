"""Descriptions of tools: what signature and docstring become, which functions are refused, and what arguments fit."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from cohort.errors import TaskError
from cohort.tools.schema import make_tool, make_tools


def find(query: str, top: int = 3, kind: Literal["title", "text"] = "text", tags: list[str] | None = None) -> str:
    """Searches the passages.

    Returns the best ones.

    Args:
        query: What to look for.
        top (int): How many.
    """
    return f"{query} {top} {kind} {tags}"


class Owner:
    def look(self, x: float) -> str:
        """Looks."""
        return str(x)


def test_signature_and_docstring_become_a_json_schema() -> None:
    about = make_tool(find).describe()
    assert about == {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Searches the passages.\n\nReturns the best ones.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for."},
                    "top": {"type": "integer", "description": "How many."},
                    "kind": {"type": "string", "enum": ["title", "text"]},
                    "tags": {"type": "array", "items": {"type": "string"}, "nullable": True},
                },
                "required": ["query"],
            },
        },
    }


def test_the_object_of_a_bound_method_is_no_parameter() -> None:
    assert make_tool(Owner().look).parameter_names == ("x",)


def no_docstring(x: str) -> str:
    return x


def no_type(x) -> str:  # type: ignore[no-untyped-def]
    """Has none."""
    return x


def odd_type(x: set[int]) -> str:
    """Has an odd one."""
    return str(x)


def any_number(*x: str) -> str:
    """Takes any number."""
    return str(x)


def unknown_type(x: Missing) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Names a type that is nowhere."""
    return str(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "no docstring"),
        (no_type, "parameter x has no type; write x: str"),
        (odd_type, "which a model cannot write as JSON"),
        (any_number, "cannot be given by name"),
        (unknown_type, "annotations cannot be read"),
        (lambda x: x, "has no name that a model could call"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused_with_the_remedy(function: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make_tool(function)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(TaskError, match='two tools have the name "find"'):
        make_tools([find, find])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"query": "a"}, {"query": "a"}),
        ({"query": "a", "top": 2.0}, {"query": "a", "top": 2}),
        ({"query": "a", "tags": None}, {"query": "a", "tags": None}),
        ({"query": "a", "tags": ["b"]}, {"query": "a", "tags": ["b"]}),
    ],
)
def test_arguments_that_fit(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    found = make_tool(find).check_arguments(arguments)
    assert found == expected
    assert all(type(found[name]) is type(value) for name, value in expected.items())


@pytest.mark.parametrize(("value", "message"), [(10**400, "is too large"), (float("nan"), "finite"), (1e999, "finite")])
def test_a_number_without_a_value_is_refused(value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_tool(Owner().look).check_arguments({"x": value})


def test_a_whole_number_fits_a_float() -> None:
    assert type(make_tool(Owner().look).check_arguments({"x": 2})["x"]) is float


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, 'the argument "query" is missing'),
        ({"query": "a", "limit": 3}, 'there is no argument "limit"'),
        ({"query": 3}, 'the argument "query" must be of the type string'),
        ({"query": None}, 'the argument "query" must be of the type string'),
        ({"query": "a", "top": 2.5}, 'the argument "top" must be of the type integer'),
        ({"query": "a", "top": True}, 'the argument "top" must be of the type integer'),
        ({"query": "a", "kind": "body"}, 'the argument "kind" must be one of title, text'),
        ({"query": "a", "tags": [1]}, 'the argument "tags" must be of the type string'),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_tool(find).check_arguments(arguments)
