"""Conversations as raw text without a chat template: for base models, with the setting `template = "text"`."""

from __future__ import annotations

from collections.abc import Sequence

from cohort.errors import TaskError
from cohort.types import Message

GAP = "\n\n"


def join_contents(messages: Sequence[Message]) -> str:
    """Returns the contents of the messages as one text, separated by blank lines.

    A blank line ends the text, except after a final assistant message, which the model continues. Roles are not
    written. Raises TaskError if a content is not text.

    >>> join_contents([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}])
    'Be brief.\\n\\n1+1?\\n\\n'
    >>> join_contents([{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<think>"}])
    '1+1?\\n\\n<think>'
    """
    contents = [m.get("content") for m in messages]
    if not all(isinstance(content, str) for content in contents):
        raise TaskError(
            "a message of the prompt has a content that is not text, but the setting template is text; "
            "set --template chat, or make the content a string in the task's method `prompt`"
        )
    continued = bool(messages) and messages[-1].get("role") == "assistant"
    return GAP.join(map(str, contents)) + ("" if continued else GAP)
