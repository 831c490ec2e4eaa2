"""What a user puts around the messages of a task: a system prompt, and a chat template from a file."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cohort.errors import ConfigError
from cohort.system.paths import expand_home
from cohort.text.bounded import MAX_SOURCE
from cohort.text.plain import add_system
from cohort.text.tokenizer import RawTextRenderer, RenderedPrompt, Tokenizer
from cohort.tools.formats import FORMATS, FormatName, choose_format
from cohort.types import Message


def read_template(template: str) -> str:
    """Returns the text of the template file that the setting `template` names; "" if it is "chat" or "text".

    Raises ConfigError if the file cannot be read, is no regular file (such as a pipe), is too large, or is empty.
    """
    if template in ("chat", "text"):
        return ""
    path = expand_home(template)
    try:
        problem = _find_problem(path.stat())
        text = "" if problem else path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "") or error
        raise ConfigError(
            f"the template file {template} cannot be read ({reason}). Correct --template, or put the file there."
        ) from None
    if problem:
        raise ConfigError(f"the template file {template} {problem}. Name a file with a chat template with --template.")
    if not text.strip():
        raise ConfigError(
            f"the template file {template} is empty. Write a chat template into it, or correct --template."
        )
    return text


def _find_problem(about: os.stat_result) -> str:
    """Returns why a template file must not be read, as the end of a sentence; "" if it may be.

    A pipe would be waited for, and a device read without end.
    """
    if not stat.S_ISREG(about.st_mode):
        return "is no regular file"
    # A character has at most four bytes.
    if about.st_size > 4 * MAX_SOURCE:
        return f"has {about.st_size} bytes, but a template has at most {MAX_SOURCE} characters"
    return ""


def digest_template(template: str) -> str:
    """Returns 16 hexadecimal digits of a hash of the template file; "" if the setting `template` names none."""
    text = read_template(template)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


def describe_template(template: str) -> str:
    """Returns the setting `template` as evaluations record it: a file by its name and the digest of its text."""
    digest = digest_template(template)
    return f"{Path(template).name} {digest}" if digest else template


class PromptRenderer:
    """A renderer of prompts as the settings `template` and `system` say. It takes the place of a tokenizer.

    Tools are described by the chat template, or in the system prompt if the template knows no tools.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, system: str, format: FormatName | None = None) -> None:
        self._tokenizer = tokenizer
        self._inner = RawTextRenderer(tokenizer) if template == "text" else tokenizer
        self._system = system
        # How the model writes calls of tools; None = as its chat template suggests.
        self._format = format

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> RenderedPrompt:
        """Returns the messages, after the system prompt, as the tokens of a prompt, which offers `tools` if any."""
        messages = add_system(messages, self._system)
        if not tools:
            return self._inner.render(messages)
        format = FORMATS[self._format or choose_format(self._tokenizer.get_template_source(with_tools=True))]
        if format.is_native:
            return self._inner.render(messages, tools)
        return self._inner.render(add_system(messages, format.describe_tools(tools)))

    def check_system(self, limit: int) -> None:
        """Raises ConfigError if the system prompt alone has more than `limit` tokens; 0 = no limit."""
        num = len(self._tokenizer.encode(self._system)) if self._system and limit else 0
        if num > limit:
            raise ConfigError(
                f"--system has {num} tokens, more than the {limit} that a prompt may have beside its completion. "
                "Shorten --system, or use a model with a longer context."
            )
