"""The record of a conversation: the user's messages, and for every model the tokens that it was given and wrote.

Each model has a token stream of its own, because models differ in tokenizer, template and answers. What a model wrote
stays as the tokens that were sampled: text is not tokenised again. Every function returns a new record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cohort.types import Finish, Message, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTurn:
    """What one model was given and wrote in one exchange."""

    asked: tuple[int, ...]  # tokens put before the answer, after those of the turn before
    restarts: bool  # whether `asked` is the whole conversation so far, and the turns before do not count
    written: tuple[int, ...]  # the tokens that were sampled, the end token included; in an episode also the replies
    text: str  # in an episode the last turn alone
    finish: Finish
    forced_text: str = ""  # a beginning of the answer that the model had to continue
    seconds: float = 0.0
    outcome: Outcome | None = None  # of the grader; None = the answer was not scored
    # Of an episode with tools or an environment: everything after the prompt, where each token in `written` comes from,
    # the calls of tools by outcome, and the rewards of single turns. All are empty for a plain answer.
    messages: tuple[Message, ...] = ()
    provenance: tuple[int, ...] = ()
    calls: tuple[tuple[str, int], ...] = ()
    earned: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A message of the user, or the prompt of a task, and the answers of all models to it."""

    messages: tuple[Message, ...]
    turns: tuple[ModelTurn | None, ...]  # one per model; None = it did not answer, because its context was full
    attempt: int = 0  # how often these messages were asked before, with other random numbers
    row: str = ""  # id of the task's row; "" = the user's own words
    number: int = 0  # among all exchanges since the conversation began, those that were taken back included
    # Of a task's problem, per model: problems that it has answered rightly so far, and those that were scored.
    counts: tuple[tuple[int, int], ...] = ()
    tools: tuple[Any, ...] = ()  # descriptions of the tools that the prompt offers


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A system prompt and the exchanges since the conversation began.

    The models see `exchanges` only. Those that were taken back are kept for the file that a user may save.
    """

    system: str = ""
    exchanges: tuple[Exchange, ...] = ()
    taken_back: tuple[Exchange, ...] = ()

    def add(self, exchange: Exchange) -> Conversation:
        """Returns the conversation with one more exchange at its end."""
        number = len(self.exchanges) + len(self.taken_back)
        return replace(self, exchanges=(*self.exchanges, replace(exchange, number=number)))

    def replace_last(self, exchange: Exchange) -> Conversation:
        """Returns the conversation with another record of its last exchange, such as one with verdicts."""
        number = self.exchanges[-1].number
        return replace(self, exchanges=(*self.exchanges[:-1], replace(exchange, number=number)))

    def undo(self) -> Conversation:
        """Returns the conversation with its last exchange taken back; an empty one stays empty."""
        taken_back = (*self.taken_back, *self.exchanges[-1:])
        return replace(self, exchanges=self.exchanges[:-1], taken_back=taken_back)

    def reset(self) -> Conversation:
        """Returns an empty conversation with the same system prompt."""
        return Conversation(system=self.system)

    def list_all(self) -> list[tuple[Exchange, bool]]:
        """Returns all exchanges in the order in which they took place, each with whether it was taken back."""
        pairs = [(exchange, False) for exchange in self.exchanges] + [(exchange, True) for exchange in self.taken_back]
        return sorted(pairs, key=lambda pair: pair[0].number)

    def list_turns(self, model: int) -> list[ModelTurn]:
        """Returns the turns of a model, by its place in the list of models, without exchanges that it did not answer.

        A first turn that a restart follows is among them.
        """
        turns = (exchange.turns[model] for exchange in self.exchanges)
        return [turn for turn in turns if turn is not None]

    def get_stream(self, model: int) -> list[int]:
        """Returns the tokens of a model's conversation so far; [] before its first answer."""
        stream: list[int] = []
        for turn in self.list_turns(model):
            stream = [] if turn.restarts else stream
            stream += [*turn.asked, *turn.written]
        return stream

    def list_messages(self, model: int) -> list[Message]:
        """Returns the messages of a model's conversation so far, its own answers included, without the system prompt.

        Exchanges that the model did not answer are left out.
        """
        messages: list[Message] = []
        for exchange in self.exchanges:
            if (turn := exchange.turns[model]) is not None:
                asked = list(exchange.messages)
                # A prompt may end with the beginning of the answer, which the answer repeats.
                messages += asked[:-1] if asked[-1]["role"] == "assistant" else asked
                messages += turn.messages or ({"role": "assistant", "content": turn.forced_text + turn.text},)
        return messages

    def replace_system(self, system: str, render: Callable[[int, Exchange], list[int]]) -> Conversation:
        """Returns the conversation under another system prompt. What the models wrote keeps its tokens.

        `render(model, exchange)` returns the tokens of the messages of an exchange, after the new system prompt. Only
        those of the first exchange of a model are made anew.
        """
        exchanges = list(self.exchanges)
        for model in range(len(exchanges[0].turns) if exchanges else 0):
            first = next((n for n, exchange in enumerate(exchanges) if exchange.turns[model] is not None), None)
            if first is None:
                continue
            turns = list(exchanges[first].turns)
            turn = turns[model]
            assert turn is not None
            turns[model] = replace(turn, asked=tuple(render(model, exchanges[first])))
            exchanges[first] = replace(exchanges[first], turns=tuple(turns))
        return replace(self, system=system, exchanges=tuple(exchanges))
