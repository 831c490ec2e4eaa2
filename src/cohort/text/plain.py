"""Conversations as raw text, without a chat template: for base models, and only when asked for."""

from __future__ import annotations

from collections.abc import Sequence

from cohort.errors import TaskError
from cohort.types import Message

GAP = "\n\n"


def plain_text(messages: Sequence[Message]) -> str:
    """The contents one after the other; a final assistant message follows directly, to be continued.

    >>> plain_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}])
    'Be brief.\\n\\n1+1?\\n\\n'
    >>> plain_text([{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<think>"}])
    '1+1?\\n\\n<think>'
    """
    contents = [m.get("content") for m in messages]
    if not all(isinstance(content, str) for content in contents):
        raise TaskError("a prompt as raw text needs messages whose content is text")
    continued = bool(messages) and messages[-1].get("role") == "assistant"
    return GAP.join(map(str, contents)) + ("" if continued else GAP)
