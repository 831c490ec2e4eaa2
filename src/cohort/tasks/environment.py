"""What an environment is: one episode of a conversation with the policy, started and then stepped answer by answer.

A task with `prompt` and `score` is the environment with one step (`SingleTurn`). `ThinkAgain` wraps another one.
Environments run in the scoring workers, which can be killed: an episode is played again from its key and the answers
so far, so an environment must do the same whenever it is given the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from cohort.tasks.base import Task, grade
from cohort.tasks.draws import Draws
from cohort.types import Answer, Finish, Key, Message, Row

MOST_LIVE = 4096  # environments kept in memory; one that was dropped is played again when its episode goes on


@dataclass(frozen=True, slots=True)
class KeyedDraws:
    """The randomness of one episode: a function of its key, so that games and worded replies repeat on resume."""

    key: Key

    def at(self, name: str, turn: int) -> Draws:
        """The draws of this name in a turn."""
        k = self.key
        return Draws(name, k.seed, k.purpose, k.task, k.prompt_id, k.visit, k.sample, turn)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """How an episode begins: what the policy is asked, and the tools it is offered."""

    messages: list[Message]
    tools: list[Any] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What an environment makes of an answer.

    `parts` are the reward's, by name, for the episode as it stands: the last ones count. None = no reward yet. `cost`
    is taken from the reward. `replies` are put before the policy's next turn, where the episode is not `done`.
    """

    parts: dict[str, float] | None = None
    reason: str = ""
    cost: float = 0.0
    replies: list[Message] = field(default_factory=list)
    done: bool = True


class Environment(Protocol):
    """One episode."""

    def start(self, row: Row, draws: KeyedDraws) -> Opening:
        """Begin; called once, before any step."""

    def step(self, answer: Answer) -> Step:
        """Take the policy's next message, with what is known of how it ended."""


class SingleTurn:
    """One prompt, one answer, which the task scores. Asked again, it scores the new answer."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.row: Row = {}

    def start(self, row: Row, draws: KeyedDraws) -> Opening:
        self.row = row
        return Opening(messages=self.task.prompt(row))

    def step(self, answer: Answer) -> Step:
        outcome = grade(self.task, self.row, answer)
        return Step(parts=outcome.parts, reason=outcome.reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgainRules:
    """When and how another attempt is asked for."""

    attempts: int  # further ones at most
    below: float  # the reward at or under which there is one
    cost: float  # what each takes from the reward
    words: tuple[str, ...]  # one of these is the user's turn
    coefficients: dict[str, float]  # of the reward's parts


class ThinkAgain:
    """A low reward is answered by a user's turn that asks for another attempt. The last attempt counts."""

    def __init__(self, inner: Environment, rules: AgainRules) -> None:
        self.inner, self.rules = inner, rules
        self.draws: KeyedDraws | None = None
        self.num_turns = 0

    def start(self, row: Row, draws: KeyedDraws) -> Opening:
        self.draws = draws
        return self.inner.start(row, draws)

    def step(self, answer: Answer) -> Step:
        """An answer that was cut off has not ended, so nothing is said after it."""
        assert self.draws is not None, "an episode is started before it is stepped"
        found, rules = self.inner.step(answer), self.rules
        self.num_turns += 1
        found = replace(found, cost=found.cost + rules.cost * (self.num_turns - 1))
        if not found.done or found.parts is None:
            return found
        if self.num_turns > rules.attempts or answer.finish != Finish.STOP:
            return found
        if total_reward(found.parts, rules.coefficients) > rules.below:
            return found
        words = self.draws.at("again", self.num_turns).choice(rules.words)
        return replace(found, replies=[{"role": "user", "content": words}], done=False)


def total_reward(parts: Mapping[str, float], coefficients: Mapping[str, float]) -> float:
    """The sum of the parts, each times its coefficient; a part that has none counts once.

    >>> total_reward({"correct": 1.0, "format": 0.5}, {"format": 2.0})
    2.0
    """
    return sum(coefficients.get(name, 1.0) * value for name, value in parts.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """An episode before its newest answer: all that is needed to play it to there again, anywhere."""

    key: Key
    answers: tuple[Answer, ...] = ()


class Episodes:
    """Plays episodes and keeps their environments while they last.

    `make` gives a new environment. One that is not here, or that has heard anything else than the episode's answers,
    is made anew and told the earlier answers. Keys repeat, and an answer may have gone to another worker, so the number
    of answers would not tell.
    """

    def __init__(self, make: Callable[[], Environment]) -> None:
        self.make = make
        self._live: OrderedDict[Key, tuple[Environment, bytes]] = OrderedDict()  # with the name of what it has heard

    def step(
        self, row: Row, past: Past, answer: Answer, before: Callable[[Answer], None] = lambda answer: None
    ) -> Step:
        """The environment's next step; `before` is told every answer that it is about to get."""
        # Out of the table while it works: what raises is not in a state to go on from.
        environment, heard = self._live.pop(past.key, (None, b""))
        then = _name(row, (*past.answers, answer))  # now: a grader may change what it is given
        if environment is None or heard != _name(row, past.answers):
            environment = self.make()
            before(answer)
            environment.start(row, KeyedDraws(past.key))
            for earlier in past.answers:
                before(earlier)
                environment.step(earlier)
        before(answer)
        found = environment.step(answer)
        if not found.done:
            self._live[past.key] = (environment, then)
            if len(self._live) > MOST_LIVE:
                self._live.popitem(last=False)
        return found

    def __len__(self) -> int:
        return len(self._live)


def _name(row: Row, answers: tuple[Answer, ...]) -> bytes:
    """Names what an environment was given: the row and the answers, in full."""
    given = [row, *([getattr(a, f.name) for f in dataclasses.fields(a)] for a in answers)]
    return hashlib.blake2b(json.dumps(given, default=repr).encode(), digest_size=16).digest()
