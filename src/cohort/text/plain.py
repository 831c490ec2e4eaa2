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


def add_system(messages: Sequence[Message], system: str) -> list[Message]:
    """Returns the messages with the text `system` as a system message before them; unchanged if it is "".

    If a task begins with a system message of its own, the text is put before that one's, with a blank line between.

    >>> add_system([{"role": "user", "content": "1+1?"}], "Be brief.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '1+1?'}]
    >>> add_system([{"role": "system", "content": "Add."}], "Be brief.")
    [{'role': 'system', 'content': 'Be brief.\\n\\nAdd.'}]
    """
    if not system:
        return list(messages)
    first = messages[0] if messages else {}
    if first.get("role") == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": system + GAP + first["content"]}, *messages[1:]]
    return [{"role": "system", "content": system}, *messages]
