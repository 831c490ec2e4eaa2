"""Chat templates: Jinja programs that come with a model. They are foreign code and run in a sandbox on plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from cohort.errors import ModelError, shorten_error
from cohort.text.bounded import MAX_PRECISION, MAX_SOURCE, BoundedEnvironment, TemplateLimitError
from cohort.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateDescription:
    """How messages speak of a chat template, by where it comes from."""

    subject: str  # what the message is about
    remedy: str  # how to correct the template
    other: str  # what to use in place of it


FROM_MODEL = TemplateDescription(
    subject="the model's chat template",
    remedy="use another model, or correct it in the model's folder (chat_template.jinja, or chat_template in "
    "tokenizer_config.json or chat_template.json)",
    other="use another model",
)
FROM_FILE = TemplateDescription(
    subject="the chat template in the file of --template",
    remedy="correct that file, or name another one with --template",
    other="correct that file",
)


# Variables of a template whose values are the two marks around what is in {% generation %}.
_MARKS = ("generation_begins_here", "generation_ends_here")


class ChatTemplate:
    """A compiled chat template with the variables that the tokenizer gives it (bos_token, eos_token, ...).

    `date` is the day, as YYYY-MM-DD, that the template sees as today; "" = the real one. Messages
    name its `origin`.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str], date: str = "", origin: TemplateDescription = FROM_MODEL
    ) -> None:
        self.source = source
        self.origin = origin
        self._variables = dict(variables)
        self._environment = _make_environment(date)
        if len(source) > MAX_SOURCE:
            raise ModelError(f"{origin.subject} has {len(source)} characters, more than {MAX_SOURCE}; {origin.remedy}")
        self._environment.start()
        try:
            self._compiled = self._environment.from_string(source)
        # Python's own compiler raises the errors after the first for programs that are nested too deeply.
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as e:
            raise ModelError(f"{origin.subject} is not valid Jinja: {shorten_error(e)}; {origin.remedy}") from e

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        generation_prompt: bool,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """Returns the conversation as the text that the template writes.

        `tools` are JSON descriptions of functions that the model may call; None = no tools. With `generation_prompt`
        the template is asked to end with the header of the assistant's next turn; some templates have none. The two
        `marks` are written before and after what is in {% generation %}. Raises ModelError if the template fails on
        these messages, or takes too much time or memory.
        """
        history = list(messages)
        functions = None if tools is None else list(tools)
        try:
            self._environment.start(history, functions)
            return self._compiled.render(
                messages=history,
                tools=functions,
                documents=None,
                add_generation_prompt=generation_prompt,
                **dict(zip(_MARKS, marks, strict=True)),
                **self._variables,
            )
        except (TemplateLimitError, RecursionError, MemoryError) as e:
            raise ModelError(f"{self.origin.subject} is too much work: {shorten_error(e)}; {self.origin.remedy}") from e
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
                f"{self.origin.subject} cannot render the conversation: {shorten_error(e)}; change the roles or "
                f"fields of the messages in the task's method `prompt`, or {self.origin.other}"
            ) from e


def _make_environment(date: str) -> BoundedEnvironment:
    """Returns the Jinja sandbox in which templates run. `date` is as in `ChatTemplate`.

    It has the whitespace rules, filters and functions that templates may use in transformers.
    """
    env = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    env.add_filter("tojson", _tojson)
    env.globals["raise_exception"] = _raise_template_error
    env.globals["strftime_now"] = partial(_format_date, date)
    return env


class _GenerationBlock(jinja2.ext.Extension):
    """The tag {% generation %}, with which templates mark the assistant's text: it is written between two marks."""

    tags = {"generation"}  # noqa: RUF012 jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Reads the template up to {% endgeneration %} and returns that content as a Jinja node.

        Jinja calls this at the tag.
        """
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        first, last = (jinja2.nodes.Output([jinja2.nodes.Name(name, "load")]) for name in _MARKS)
        return jinja2.nodes.Scope([first, *body, last]).set_lineno(line)


@jinja2.pass_environment
def _tojson(
    environment: BoundedEnvironment,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns the value as JSON text: the filter `tojson` of templates.

    Unlike Jinja's own filter, it escapes no HTML characters, and non-ASCII characters only with `ensure_ascii`.
    """
    if isinstance(indent, int | str) and (indent if isinstance(indent, int) else len(indent)) > MAX_PRECISION:
        raise TemplateLimitError(f"it indents JSON by more than {MAX_PRECISION}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return environment.concat(encoder.iterencode(value)) if indent is not None else encoder.encode(value)


def _raise_template_error(message: str) -> None:
    """Raises a TemplateError with the message. Templates call it as `raise_exception` to refuse messages."""
    raise jinja2.TemplateError(message)


def _format_date(date: str, layout: str) -> str:
    """Returns a date, YYYY-MM-DD, at midnight in the strftime format `layout`; "" = the current local time.

    Templates call it as `strftime_now`, with the layout alone.
    """
    return (datetime.fromisoformat(date) if date else datetime.now()).strftime(layout)
