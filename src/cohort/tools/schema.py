"""Tools: typed Python functions that a model may call. Signature and docstring give the description as JSON schema."""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

import docstring_parser

from cohort.errors import TaskError

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function that a model may call, with its description."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of an object
    function: Callable[..., Any]

    def describe(self) -> dict[str, Any]:
        """Returns the description that chat templates take."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of the signature."""
        return tuple(self.parameters["properties"])

    def check_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call as the function takes them.

        A whole number is accepted for a float, and 2.0 for an int. Raises ValueError, with a text for the model, for a
        missing or unknown argument, and for one of another type.
        """
        properties = self.parameters["properties"]
        for name in arguments:
            if name not in properties:
                known = ", ".join(properties) or "none"
                raise ValueError(f'there is no argument "{name}" (arguments: {known})')
        for name in self.parameters["required"]:
            if name not in arguments:
                raise ValueError(f'the argument "{name}" is missing')
        return {name: _convert(name, value, properties[name]) for name, value in arguments.items()}


def make_tool(function: Callable[..., Any]) -> Tool:
    """Returns a function, or a bound method, as a tool.

    Every parameter needs an annotation: str, int, float, bool, a list or dict of them, a Literal, or one of these or
    None. The docstring describes the tool and, in a section "Args:", its parameters. Raises TaskError for a function
    that cannot be described.
    """
    name = getattr(function, "__name__", "")
    where = f"the tool {name or function!r}"
    if not callable(function) or not _NAME.fullmatch(name):
        raise TaskError(f"{where} has no name that a model could call; define it with def, as a function or a method")
    doc = docstring_parser.parse(inspect.getdoc(function) or "")
    about = "\n\n".join(text for text in (doc.short_description, doc.long_description) if text)
    if not about:
        raise TaskError(f'{where} has no docstring, by which a model would know it; write """What it does.""" in it')
    texts = {param.arg_name: param.description or "" for param in doc.params}
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise TaskError(f"{where}: its annotations cannot be read ({error}); correct them") from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TaskError(f"{where}: its parameter {parameter} cannot be given by name; use plain parameters")
        if parameter.name not in hints:
            raise TaskError(f"{where}: its parameter {parameter.name} has no type; write {parameter.name}: str")
        schema = _describe_type(hints[parameter.name], f"{where}, parameter {parameter.name}")
        if text := texts.get(parameter.name):
            schema = {**schema, "description": text}
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(name=name, description=about, parameters=parameters, function=function)


def make_tools(functions: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """Returns functions as tools by name. Raises TaskError for two of the same name, and what `make_tool` raises."""
    tools: dict[str, Tool] = {}
    for function in functions:
        tool = make_tool(function)
        if tool.name in tools:
            raise TaskError(f'two tools have the name "{tool.name}"; rename one of them')
        tools[tool.name] = tool
    return tools


def _describe_type(hint: Any, where: str) -> dict[str, Any]:
    """Returns the JSON schema of an annotation. Raises TaskError for one that JSON values cannot have."""
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if hint is Any:
        return {}
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is Literal:
        kinds = {type(value) for value in args}
        if len(kinds) == 1 and kinds <= _PLAIN.keys():
            return {"type": _PLAIN[kinds.pop()], "enum": list(args)}
    if origin is list:
        return {"type": "array"} | ({"items": _describe_type(args[0], where)} if args else {})
    if origin is dict:
        return {"type": "object"}
    if origin in (Union, types.UnionType) and type(None) in args and len(args) == 2:
        inner = next(arg for arg in args if arg is not type(None))
        return {**_describe_type(inner, where), "nullable": True}
    raise TaskError(
        f"{where} has the type {hint}, which a model cannot write as JSON; use str, int, float, bool, list, dict, "
        "Literal of texts or numbers, or one of these | None"
    )


def _convert(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    """Returns a JSON value as the schema of its parameter wants it. Raises ValueError if it is of another type."""
    if value is None and schema.get("nullable"):
        return None
    kind = schema.get("type")
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f'the argument "{name}" must be a finite number')
    if kind == "number" and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f'the argument "{name}" is too large') from None
    if kind == "integer" and type(value) is float and value.is_integer():
        return int(value)
    expected = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
    if kind is not None and type(value) is not expected[kind]:
        raise ValueError(f'the argument "{name}" must be of the type {kind}')
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f'the argument "{name}" must be one of {", ".join(map(str, schema["enum"]))}')
    if kind == "array" and "items" in schema:
        return [_convert(name, item, schema["items"]) for item in value]
    return value
