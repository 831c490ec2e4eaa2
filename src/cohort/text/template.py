"""Chat templates: foreign Jinja programs that come with a model, run in a sandbox on plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from cohort.errors import ModelError
from cohort.types import Message


class ChatTemplate:
    """A compiled template with the variables the tokenizer gives it (bos_token, eos_token, ...)."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(variables)
        try:
            self._compiled = _environment().from_string(source)
        except jinja2.TemplateError as e:
            raise ModelError(f"the chat template is not valid Jinja: {e}") from e

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, generation_prompt: bool) -> str:
        """The conversation as text, with the header of the assistant's turn at the end if asked for."""
        try:
            return self._compiled.render(
                messages=list(messages),
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        # what a program that does not fit its data can raise, the template's own raise_exception included
        except (
            jinja2.TemplateError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
        ) as e:
            raise ModelError(f"the chat template refused the messages: {e}") from e


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What transformers' templates may use: the same whitespace rules, filters and functions."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = _strftime_now
    return env


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks assistant text for trackers; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
