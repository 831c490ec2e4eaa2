"""Answers of several models at the same time: one request per engine, and pieces of text as they are sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cohort.chat.conversation import Conversation
from cohort.chat.models import ChatModel
from cohort.chat.options import DEFAULT_MAX_TOKENS, ChatOptions
from cohort.engines.base import Request
from cohort.errors import CohortError, ConfigError, ModelError
from cohort.text import TextStream
from cohort.types import Key, Message, Sample, Sampling

REQUEST_ID = "answer"  # every engine has one request at a time
POLL_SECONDS = 0.01  # that an engine in another process may wait for news while others work


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRequest:
    """A request to a model, and what it adds to the model's conversation."""

    request: Request
    asked: tuple[int, ...]  # as in `ModelTurn`
    restarts: bool  # as in `ModelTurn`
    forced_text: str = ""
    is_cut_by_context: bool = False  # whether the context allows fewer tokens than the options


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """New text of one model's answer. The last piece of an answer has its sample."""

    model: int  # place in the list of models
    text: str
    sample: Sample | None = None
    seconds: float = 0.0  # since the question


def prepare_request(
    model: ChatModel,
    index: int,
    conversation: Conversation,
    messages: Sequence[Message],
    options: ChatOptions,
    key: Key,
) -> PreparedRequest:
    """Returns the request for a model's answer to `messages`, which follow its conversation so far.

    `index` is the model's place in the conversation. The tokens are the stream so far and the new message. Only if the
    chat template allows no continuation is the whole conversation rendered again from its text. Raises ConfigError,
    with the numbers, if the context has no room for an answer.
    """
    turns = conversation.list_turns(index)
    before: list[int] = []
    forced_text = ""
    asked = _encode_follow_up(model, messages, turns[-1].written) if turns else None
    restarts = asked is None
    if asked is None:
        rendered = model.render([*conversation.list_messages(index), *messages], conversation.system)
        asked, forced_text = rendered.tokens, rendered.forced_text
    else:
        before = conversation.get_stream(index)
    num = len(before) + len(asked)
    room = model.context - num
    if room < 1:
        raise ConfigError(
            f"{model.label}: the conversation has {num} tokens with this message, and the context of the model "
            f"{model.context}. /undo takes the last exchange back, /reset begins anew."
        )
    max_tokens = options.max_tokens or DEFAULT_MAX_TOKENS
    sampling = Sampling(
        max_tokens=min(max_tokens, room),
        temperature=options.temperature,
        top_p=options.top_p if options.temperature > 0 else 1.0,
        stop_ids=model.tokenizer.stop_ids,
    )
    request = Request(id=REQUEST_ID, tokens=[*before, *asked], sampling=sampling, key=key)
    return PreparedRequest(
        request=request,
        asked=tuple(asked),
        restarts=restarts,
        forced_text=forced_text,
        is_cut_by_context=room < max_tokens,
    )


def _encode_follow_up(model: ChatModel, messages: Sequence[Message], written: Sequence[int]) -> list[int] | None:
    """Returns the tokens of the user's next message after the answer `written`.

    None = the model's template cannot continue a conversation, or `messages` are not one message of the user.
    """
    if len(messages) != 1 or messages[0]["role"] != "user":
        return None
    try:
        return model.encode_follow_up(str(messages[0]["content"]), written)
    except ModelError:
        return None


def stream_answers(
    models: Sequence[ChatModel], requests: Mapping[int, Request], is_stopped: Callable[[], bool]
) -> Iterator[Piece]:
    """Submits one request per model, and yields pieces of all answers as they come, until every answer has ended.

    `requests` are by the place of the model. When `is_stopped()` becomes true, every answer is cut where it is: its
    sample has finish = abort. If an engine raises an error, the other requests are aborted too.
    """
    begin = time.perf_counter()
    streams = {index: TextStream(models[index].tokenizer) for index in requests}
    under_way: list[int] = []
    try:
        for index, request in requests.items():
            models[index].engine.submit(request)
            under_way.append(index)
        while under_way:
            for index in list(under_way):
                for event in models[index].engine.poll(POLL_SECONDS):
                    text = streams[index].push(drop_stop(event.tokens, requests[index]))
                    if event.sample is not None:
                        under_way.remove(index)
                        text += streams[index].finish()
                    yield Piece(model=index, text=text, sample=event.sample, seconds=time.perf_counter() - begin)
            if is_stopped():
                for index in list(under_way):
                    under_way.remove(index)
                    sample = models[index].engine.abort(REQUEST_ID)
                    text = streams[index].finish()
                    yield Piece(model=index, text=text, sample=sample, seconds=time.perf_counter() - begin)
    finally:
        for index in under_way:
            # An engine that has failed may have lost the request.
            with suppress(CohortError):
                models[index].engine.abort(REQUEST_ID)


def drop_stop(tokens: list[int], request: Request) -> list[int]:
    """Returns the tokens without a stop token at their end, which is not part of the answer's text."""
    return tokens[:-1] if tokens and tokens[-1] in request.sampling.stop_ids else tokens
