"""Traces as tokens with their provenance. The chat template alone decides how a conversation is written."""

from __future__ import annotations

import json

from cohort.tasks.traces.styles import Trace
from cohort.text import Tokenizer
from cohort.types import Message, Provenance

Example = tuple[list[int], list[int]]
"""(tokens, provenance): TARGET tokens are imitated, the others are only seen."""


def encode(tokenizer: Tokenizer, trace: Trace) -> Example:
    """What the assistant says is the target, its end of turn included."""
    tokens: list[int] = []
    provenance: list[int] = []
    for i, message in enumerate(trace.messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.render(trace.messages[:i], trace.tools).tokens
        assert before[: len(tokens)] == tokens, f"the template rewrites what was said: {trace.messages[:i]}"
        seen = before[len(tokens) :]
        target = [*tokenizer.encode(spoken(message), markup=True), tokenizer.end_of_turn]
        provenance += [int(Provenance.ENVIRONMENT if tokens else Provenance.PROMPT)] * len(seen)
        provenance += [int(Provenance.TARGET)] * len(target)
        tokens += seen + target
    return tokens, provenance


def spoken(message: Message) -> str:
    """An assistant message as the model writes it."""
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
    return message["content"] + "".join(f"<tool_call>{call}</tool_call>" for call in calls)
