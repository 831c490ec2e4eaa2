"""Chat templates: Jinja programs that come with a model. They are foreign code and run in a sandbox on plain data."""

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
    """A compiled chat template with the variables that the tokenizer gives it (bos_token, eos_token, ...)."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(variables)
        try:
            self._compiled = _make_environment().from_string(source)
        except jinja2.TemplateError as e:
            raise ModelError(
                f"the model's chat template is not valid Jinja: {e}; correct it in the model's folder "
                "(chat_template.jinja, or chat_template in tokenizer_config.json or chat_template.json)"
            ) from e

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, generation_prompt: bool) -> str:
        """Returns the conversation as the text that the template writes.

        `tools` are JSON descriptions of functions that the model may call; None = no tools. With `generation_prompt`
        the template is asked to end with the header of the assistant's next turn; some templates have none. Raises
        ModelError if the template fails on these messages.
        """
        try:
            return self._compiled.render(
                messages=list(messages),
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        # Errors that a template raises on data that it does not expect, its own raise_exception included.
        except (
            jinja2.TemplateError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
        ) as e:
            raise ModelError(
                f"the model's chat template cannot render the conversation: {e}; change the roles or fields of the "
                "messages in the task's method `prompt`, or use another model"
            ) from e


def _make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Returns the Jinja sandbox in which templates run.

    It has the whitespace rules, filters and functions that templates may use in transformers.
    """
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_template_error
    env.globals["strftime_now"] = _strftime_now
    return env


class _GenerationBlock(jinja2.ext.Extension):
    """The tag {% generation %}, with which transformers marks the assistant's text. Here it only groups its content."""

    tags = {"generation"}  # noqa: RUF012 jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Reads the template up to {% endgeneration %} and returns that content as a Jinja node.

        Jinja calls this at the tag.
        """
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
    """Returns the value as JSON text: the filter `tojson` of templates.

    Unlike Jinja's own filter, it escapes no HTML characters, and non-ASCII characters only with `ensure_ascii`.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_template_error(message: str) -> None:
    """Raises a TemplateError with the message. Templates call it as `raise_exception` to refuse messages."""
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    """Returns the current local time in the strftime format `layout`. Templates call it as `strftime_now`."""
    return datetime.now().strftime(layout)
