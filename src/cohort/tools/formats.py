"""How models write calls of tools, and how the results reach them: one class per family of models.

`hermes` (Qwen and others) and `llama3` are written and described by the chat template itself. `tags` is for models
whose template knows no tools: the tools are described in the system prompt, and results come as a user's message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from cohort.system.json_text import parse_json, show_value
from cohort.tools.schema import Tool
from cohort.types import Message

FormatName = Literal["hermes", "llama3", "tags"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of a tool as the model wrote it. `problem` says why it cannot be read; "" = it can."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedResult:
    """The text that a tool returned, with the name of the tool."""

    name: str
    content: str


class CallFormat(Protocol):
    """A way to write calls of tools."""

    name: ClassVar[FormatName]
    is_native: ClassVar[bool]  # whether the chat template describes tools and writes their results

    def find_calls(self, text: str, tools: Mapping[str, Tool]) -> list[Call]:
        """Returns the calls in a message of the model, in their order; [] if it makes none."""

    def describe_tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Returns what the system prompt says about tools with these descriptions; "" if the template says it."""

    def make_replies(self, results: Sequence[NamedResult]) -> list[Message]:
        """Returns the results of a message's calls as the messages that the model is shown next."""


class TemplateCalls:
    """What formats share that the chat template itself describes and answers."""

    is_native: ClassVar[bool] = True

    def describe_tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Returns "": the template describes them."""
        return ""

    def make_replies(self, results: Sequence[NamedResult]) -> list[Message]:
        """Returns one message of the role "tool" per result."""
        return [{"role": "tool", "name": result.name, "content": result.content} for result in results]


class HermesCalls(TemplateCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen, Hermes and the bundled model write it."""

    name: ClassVar[FormatName] = "hermes"

    def find_calls(self, text: str, tools: Mapping[str, Tool]) -> list[Call]:
        """Returns the calls between tags. A tag that is not closed is a call that cannot be read."""
        pieces = text.split("<tool_call>")[1:]
        return [self._read(*piece.partition("</tool_call>")[:2]) for piece in pieces]

    @staticmethod
    def _read(content: str, end: str) -> Call:
        """Returns the call between two tags. `end` is the closing tag; "" if there is none."""
        if not end:
            return Call(problem="the tag <tool_call> is not closed")
        return _read_object(content, "arguments")


class Llama3Calls(TemplateCalls):
    """`{"name": ..., "parameters": {...}}` as the whole message, as Llama 3 writes it, or several with ; between."""

    name: ClassVar[FormatName] = "llama3"

    def find_calls(self, text: str, tools: Mapping[str, Tool]) -> list[Call]:
        """Returns the calls of a message that begins with a JSON object. Any other message makes none."""
        rest = text.strip().removeprefix("<|python_tag|>").strip()
        if not rest.startswith("{"):
            return []
        calls: list[Call] = []
        decoder = json.JSONDecoder()
        while rest.startswith("{"):
            try:
                _, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                # A message may begin with a brace without being a call.
                return [*calls, Call(problem="the call is no complete JSON object")] if '"name"' in rest else calls
            calls.append(_read_object(rest[:end], "parameters"))
            rest = rest[end:].lstrip("; \n\t\r")
        return calls


class TagCalls:
    """`<tool:NAME>text</tool>`, for models whose chat template knows no tools.

    The text is the first argument, or a JSON object with all of them.
    """

    name: ClassVar[FormatName] = "tags"
    is_native: ClassVar[bool] = False

    _OPEN = re.compile(r"<tool:([A-Za-z0-9_.-]{1,64})>")

    def find_calls(self, text: str, tools: Mapping[str, Tool]) -> list[Call]:
        """Returns the calls between tags. A tag that is not closed is a call that cannot be read."""
        calls = []
        place = 0
        while (opening := self._OPEN.search(text, place)) is not None:
            name = opening[1]
            end = text.find("</tool>", opening.end())
            following = self._OPEN.search(text, opening.end())
            if end < 0 or (following is not None and following.start() < end):
                calls.append(Call(name=name, problem=f"the tag <tool:{name}> is not closed by </tool>"))
                place = opening.end()
                continue
            calls.append(self._read(name, text[opening.end() : end], tools.get(name)))
            place = end
        return calls

    @staticmethod
    def _read(name: str, content: str, tool: Tool | None) -> Call:
        """Returns the call of a tool with the text between its tags."""
        content = content.strip()
        names = tool.parameter_names if tool is not None else ()
        if content.startswith("{"):
            try:
                value = parse_json(content)
            except ValueError:
                value = None
            # A single argument may itself begin with a brace.
            if isinstance(value, dict) and (len(names) != 1 or value.keys() <= set(names)):
                return Call(name=name, arguments=value)
        if len(names) > 1:
            return Call(name=name, problem=f"write the arguments {', '.join(names)} as a JSON object")
        return Call(name=name, arguments={names[0]: content} if names and content else {})

    def describe_tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Returns the tools with their arguments, and how to call them."""
        lines = ["You can use tools. Write a call as <tool:NAME>ARGUMENT</tool> and end your message after it. Tools:"]
        for tool in tools:
            about = tool["function"]
            names = list(about["parameters"]["properties"])
            content = names[0].upper() if len(names) == 1 else json.dumps(dict.fromkeys(names, "..."))
            call = f"<tool:{about['name']}>{content if names else ''}</tool>"
            lines.append(f"- {call}: {' '.join(about['description'].split())}")
        return "\n".join(lines)

    def make_replies(self, results: Sequence[NamedResult]) -> list[Message]:
        """Returns all results as one message of the user. A closing tag inside a result is broken."""
        texts = [f"<result:{r.name}>{r.content.replace('</result>', '< /result>')}</result>" for r in results]
        return [{"role": "user", "content": "\n".join(texts)}]


FORMATS: dict[FormatName, CallFormat] = {f.name: f for f in (HermesCalls(), Llama3Calls(), TagCalls())}
"""The formats by name."""


def choose_format(template: str) -> FormatName:
    """Returns the format that a model with this chat template was taught, by what the template writes.

    >>> choose_format("... <tool_call> ..."), choose_format("... <|eom_id|> ... parameters"), choose_format("plain")
    ('hermes', 'llama3', 'tags')
    """
    if "<tool_call>" in template:
        return "hermes"
    # The role of results, the mark before a call, and the end of a message that calls.
    return "llama3" if any(word in template for word in ("ipython", "python_tag", "eom_id")) else "tags"


def _read_object(text: str, key: str) -> Call:
    """Returns the call that a JSON object describes; `key` is the name of its arguments, the other usual one is taken
    as well."""
    try:
        value = parse_json(text)
    except ValueError as error:
        return Call(problem=f"the call is no JSON: {str(error)[:80]}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call(problem=f'the call is {show_value(value)}, not an object with "name" and "{key}"')
    name = value["name"][:64]
    arguments = value.get(key, value.get("arguments", value.get("parameters", {})))
    # Some models write the arguments as a text that is JSON.
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return Call(name=name, problem=f"its {key} are no JSON")
    if not isinstance(arguments, dict):
        return Call(name=name, problem=f"its {key} are {show_value(arguments)}, not an object")
    return Call(name=name, arguments=arguments)
