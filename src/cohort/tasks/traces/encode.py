"""Encoding of traces as tokens with their provenance. Only the chat template decides how a conversation is written."""

from __future__ import annotations

import json

from cohort.tasks.traces.styles import Trace
from cohort.text import Tokenizer
from cohort.types import Message, Provenance

Example = tuple[list[int], list[int]]
"""(tokens, provenance of each token): the loss is on TARGET tokens; the others are context."""


def encode_trace(tokenizer: Tokenizer, trace: Trace) -> Example:
    """Returns the tokens of a conversation, up to its last assistant turn, and their provenance.

    Every assistant turn is TARGET, its end token included. Context is PROMPT before the first of them and ENVIRONMENT
    later. Raises AssertionError if the chat template renders earlier turns differently later.
    """
    tokens: list[int] = []
    provenance: list[int] = []
    for i, message in enumerate(trace.messages):
        if message["role"] != "assistant":
            continue
        # The messages before this turn are rendered anew. They must begin with the tokens so far: a template that
        # writes earlier turns differently would make the example inconsistent.
        before = tokenizer.render(trace.messages[:i], trace.tools).tokens
        assert before[: len(tokens)] == tokens, f"the template rewrites earlier turns: {trace.messages[:i]}"
        context = before[len(tokens) :]
        target = [*tokenizer.encode(write_message(message), markup=True), tokenizer.end_of_turn]
        provenance += [int(Provenance.ENVIRONMENT if tokens else Provenance.PROMPT)] * len(context)
        provenance += [int(Provenance.TARGET)] * len(target)
        tokens += context + target
    return tokens, provenance


def write_message(message: Message) -> str:
    """Returns an assistant message as the text that the model writes: its content, then its tool calls in tags."""
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
    return message["content"] + "".join(f"<tool_call>{call}</tool_call>" for call in calls)
