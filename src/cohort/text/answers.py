"""Whole conversations as tokens, of which some are to be imitated: the assistant's turns, the last of them, or all.

The turns are found by the template's own marks ({% generation %}), or by rendering the conversation up to each turn. A
template that writes earlier turns differently once others follow (some drop thoughts) has no such turns: then only the
last one can be imitated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cohort.errors import TaskError
from cohort.text.tokenizer import GuardedConversation, Tokenizer
from cohort.types import Message, Provenance

Targets = Literal["assistant", "last", "all"]
"""What is imitated: every turn of the assistant, its last one, or every token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedConversation:
    """A conversation as tokens, which end with the last one to be imitated."""

    tokens: list[int]
    provenance: list[int]  # TARGET; before the first target PROMPT, between targets ENVIRONMENT


def render_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any] | None, targets: Targets
) -> RenderedConversation:
    """Returns a conversation as the tokens of the chat template. Those that `targets` names are TARGET.

    A target begins after the header of the assistant's turn and includes the stop token that ends it. Where the
    template writes no stop token after the last turn, eos is added. The conversation must end with an assistant
    message. Raises TaskError if the template changes earlier turns, and what `Tokenizer.render` raises.
    """
    chat = tokenizer.guard_chat(messages, tools)
    spans = _find_answers(tokenizer, chat, last_only=targets != "assistant")
    text, ends = spans.text, spans.ends
    if targets == "all":
        ends = [0, ends[-1]]
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    tokens, owners = tokenizer.encode_pieces(chat, pieces)
    # Pieces are context and target in turn.
    provenance = mark_targets([owner % 2 == 1 for owner in owners])
    if spans.needs_stop:
        tokens = [*tokens, tokenizer.end_of_turn]
        provenance = [*provenance, int(Provenance.TARGET)]
    if targets == "all":
        # Nothing predicts the first token.
        provenance[0] = int(Provenance.PROMPT)
    return RenderedConversation(tokens=tokens, provenance=provenance)


def render_document(tokenizer: Tokenizer, text: str) -> RenderedConversation:
    """Returns a plain text as tokens, all of them TARGET but the first, which nothing predicts. The last one is eos."""
    end = tokenizer.end_of_turn if tokenizer.eos_id is None else tokenizer.eos_id
    tokens = [*tokenizer.opening_ids, *tokenizer.encode(text), end]
    return RenderedConversation(tokens=tokens, provenance=mark_targets([False] + [True] * (len(tokens) - 1)))


def render_plain(tokenizer: Tokenizer, messages: Sequence[Message], targets: Targets) -> RenderedConversation:
    """Returns messages as tokens without a chat template: contents with blank lines between them, and eos at the end.

    With `targets` "all" every token but the first is TARGET, else those of the last message. Earlier answers are
    context, because without a template nothing ends them.
    """
    prompt = tokenizer.render_text(messages[:-1]).tokens if len(messages) > 1 else list(tokenizer.opening_ids)
    answer = tokenizer.encode(str(messages[-1]["content"]), markup=True)
    tokens = [*prompt, *answer, tokenizer.end_of_turn if tokenizer.eos_id is None else tokenizer.eos_id]
    num_context = 1 if targets == "all" else len(prompt)
    return RenderedConversation(tokens=tokens, provenance=mark_targets([i >= num_context for i in range(len(tokens))]))


def mark_targets(is_target: Sequence[bool]) -> list[int]:
    """Returns the provenance of tokens: TARGET, and for the others PROMPT before the first target, else ENVIRONMENT."""
    provenance: list[int] = []
    context = Provenance.PROMPT
    for target in is_target:
        if target:
            context = Provenance.ENVIRONMENT
        provenance.append(int(Provenance.TARGET if target else context))
    return provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answers:
    """A rendered conversation as text, and where in it the assistant's turns are."""

    text: str  # ends with the last turn
    ends: list[int]  # of context, turn, context, turn, ... in the text
    needs_stop: bool  # whether the last turn has no stop token


def _find_answers(tokenizer: Tokenizer, chat: GuardedConversation, last_only: bool) -> _Answers:
    """Returns the rendered conversation with the places of the assistant's turns, or only of the last one."""
    marked = chat.template.render(chat.messages, chat.tools, generation_prompt=False, marks=chat.tags)
    if chat.tags[0] in marked:
        answers = _read_marks(tokenizer, marked, chat.tags)
    elif last_only:
        answers = _find_last(tokenizer, chat, marked)
    else:
        answers = _compare_prefixes(tokenizer, chat, marked)
    return replace(answers, ends=answers.ends[-2:]) if last_only else answers


def _read_marks(tokenizer: Tokenizer, marked: str, tags: tuple[str, str]) -> _Answers:
    """Returns the turns between the template's own marks. A stop token right after a mark belongs to the turn."""
    text = ""
    ends: list[int] = []
    needs_stop = True
    before, *turns = marked.split(tags[0])
    for turn in turns:
        answer, _, after = turn.partition(tags[1])
        needs_stop = tokenizer.find_stop(answer) is None
        stop = tokenizer.find_stop(after)
        if needs_stop and stop is not None and not after[: stop[0]].strip():
            answer, after, needs_stop = answer + after[: stop[1]], after[stop[1] :], False
        ends += [len(text + before), len(text + before + answer)]
        text += before + answer
        before = after
    return _Answers(text=text, ends=ends, needs_stop=needs_stop)


def _compare_prefixes(tokenizer: Tokenizer, chat: GuardedConversation, whole: str) -> _Answers:
    """Returns the turns that come to light when the conversation is rendered up to each turn of the assistant.

    Raises TaskError if an earlier turn is not written in the whole conversation as it is written at its own time.
    """
    ends: list[int] = []
    needs_stop = False
    for n, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        head = chat.template.render(chat.messages[:n], chat.tools, generation_prompt=True)
        answered = chat.template.render(chat.messages[: n + 1], chat.tools, generation_prompt=False)
        stop = tokenizer.find_stop(answered[len(head) :])
        end = len(answered) if stop is None else len(head) + stop[1]
        if not answered.startswith(head) or not whole.startswith(answered[:end]):
            raise TaskError(
                f"{chat.template.origin.subject} writes message {n + 1} differently when others follow it, so that the "
                "answers are not those that the model would write. Imitate the last answer only: --loss last"
            )
        ends += [len(head), end]
        needs_stop = stop is None
    return _Answers(text=whole[: ends[-1]], ends=ends, needs_stop=needs_stop)


def _find_last(tokenizer: Tokenizer, chat: GuardedConversation, whole: str) -> _Answers:
    """Returns the last turn of the assistant: what the template writes after the prompt for it.

    A template may prepare the turn in another way than it writes it later, for example with an open thought. Then the
    turn is the content of the message as it is.
    """
    head = chat.template.render(chat.messages[:-1], chat.tools, generation_prompt=True)
    if whole.startswith(head):
        stop = tokenizer.find_stop(whole[len(head) :])
        end = len(whole) if stop is None else len(head) + stop[1]
        return _Answers(text=whole[:end], ends=[len(head), end], needs_stop=stop is None)
    content = chat.messages[-1].get("content")
    if not isinstance(content, str) or chat.messages[-1].get("tool_calls"):
        raise TaskError(
            f"{chat.template.origin.subject} prepares the last answer in another way than it writes it, and the answer "
            f"is more than text; {chat.template.origin.other}"
        )
    return _Answers(text=head + content, ends=[len(head), len(head + content)], needs_stop=True)
