"""Calls as models write them, in every format: what is read, what is malformed, and what is no call at all."""

from __future__ import annotations

from typing import Any

import pytest

from cohort.tools.formats import FORMATS, Call, FormatName, NamedResult, choose_format
from cohort.tools.schema import Tool, make_tools


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def calc(expression: str) -> str:
    """Computes."""
    return expression


def now() -> str:
    """Tells the time."""
    return ""


TOOLS: dict[str, Tool] = make_tools([add, calc, now])


def call(name: str, **arguments: Any) -> Call:
    return Call(name=name, arguments=arguments)


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("hermes", "The sum is 3.", []),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', [call("add", a=1, b=2)]),
        (
            "hermes",
            'First.\n<tool_call>\n{"name": "now"}\n</tool_call>\n<tool_call>{"name": "calc", "arguments": '
            '"{\\"expression\\": \\"1\\"}"}</tool_call> Then.',
            [call("now"), call("calc", expression="1")],
        ),
        ("hermes", '{"name": "add", "arguments": {}}', []),
        ("llama3", '{"name": "add", "parameters": {"a": 1, "b": 2}}', [call("add", a=1, b=2)]),
        ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now"}', [call("now"), call("now")]),
        ("llama3", 'I call {"name": "now"}', []),
        ("llama3", "{1, 2, 3} is a set.", []),
        ("tags", "<tool:calc>1 + 2</tool>", [call("calc", expression="1 + 2")]),
        ("tags", 'a <tool:add>{"a": 1, "b": 2}</tool> b <tool:now></tool>', [call("add", a=1, b=2), call("now")]),
        ("tags", "<tool:calc>{1}</tool>", [call("calc", expression="{1}")]),
        ("tags", "<tool:nothing>x</tool>", [call("nothing")]),
        ("tags", "</tool> <tool> <tool:>", []),
    ],
)
def test_what_is_read(format: FormatName, text: str, expected: list[Call]) -> None:
    assert FORMATS[format].find_calls(text, TOOLS) == expected


@pytest.mark.parametrize(
    ("format", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "add"', "not closed"),
        ("hermes", "<tool_call>add(1, 2)</tool_call>", "no JSON"),
        ("hermes", '<tool_call>["add"]</tool_call>', 'not an object with "name"'),
        ("hermes", '<tool_call>{"name": 7}</tool_call>', 'not an object with "name"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "not an object"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "1, 2"}</tool_call>', "no JSON"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "no JSON"),
        ("llama3", '{"name": "add", "parameters": {"a": 1', "no complete JSON object"),
        ("tags", "<tool:calc>1 + 2", "not closed"),
        ("tags", "<tool:add>1, 2</tool>", "write the arguments a, b as a JSON object"),
    ],
)
def test_what_is_malformed(format: FormatName, text: str, problem: str) -> None:
    (found,) = FORMATS[format].find_calls(text, TOOLS)
    assert problem in found.problem


def test_a_tag_inside_another_is_not_taken_for_its_argument() -> None:
    first, second = FORMATS["tags"].find_calls("<tool:calc>1 <tool:now></tool>", TOOLS)
    assert "not closed" in first.problem
    assert second == call("now")


def test_results_reach_the_model_as_its_format_writes_them() -> None:
    results = [NamedResult(name="calc", content="3"), NamedResult(name="now", content="</result>x")]
    native = [
        {"role": "tool", "name": "calc", "content": "3"},
        {"role": "tool", "name": "now", "content": "</result>x"},
    ]
    assert FORMATS["hermes"].make_replies(results) == FORMATS["llama3"].make_replies(results) == native
    (message,) = FORMATS["tags"].make_replies(results)
    assert message["role"] == "user"
    assert message["content"] == "<result:calc>3</result>\n<result:now>< /result>x</result>"


def test_tags_describe_the_tools_in_words() -> None:
    text = FORMATS["tags"].describe_tools([tool.describe() for tool in TOOLS.values()])
    assert '- <tool:add>{"a": "...", "b": "..."}</tool>: Adds.' in text
    assert "- <tool:calc>EXPRESSION</tool>: Computes." in text
    assert "- <tool:now></tool>: Tells the time." in text
    assert not FORMATS["hermes"].describe_tools([]) and not FORMATS["llama3"].describe_tools([])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{%- if tools %}<tool_call>", "hermes"),
        ("{%- if tools is not none %}<|start_header_id|>ipython", "llama3"),
        ("{{ messages[0].content }}", "tags"),
    ],
)
def test_the_template_decides_about_the_format(template: str, name: str) -> None:
    assert choose_format(template) == name
