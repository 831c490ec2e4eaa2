"""Environments: each plays one episode, a conversation with the policy that is started and stepped answer by answer.

A task with `prompt` and `score` is an environment with one step (`SingleTurn`). `ThinkAgain` wraps another environment.
Environments run in the scoring workers, which can be killed. An episode can be replayed from its key and the answers so
far, so an environment must be deterministic: the same row, draws and answers must give the same steps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from cohort.errors import TaskError
from cohort.tasks.base import Task
from cohort.tasks.draws import Draws
from cohort.tasks.grading import grade
from cohort.types import Answer, Finish, Key, Message, Row

# Environments kept in memory. One that was dropped is replayed when the next answer of its episode comes.
MAX_LIVE = 4096


@dataclass(frozen=True, slots=True)
class KeyedDraws:
    """The random numbers of one episode. They depend only on its key, so that a replayed episode draws the same."""

    key: Key

    def for_turn(self, name: str, turn: int) -> Draws:
        """Returns a source of random draws for turn number `turn` of this sample.

        Each purpose uses a `name` of its own, as in "again". Raises TaskError before there is a sample: an opening is
        the same for all samples of a group.
        """
        k = self.key
        if k.sample < 0:
            raise TaskError(
                "an environment draws its opening with draws.for_turn, which differs between the samples of a group; "
                "use draws.for_group in its method `start`"
            )
        return Draws(name, k.seed, k.purpose, k.task, k.prompt_id, k.visit, k.sample, turn)

    def for_group(self, name: str) -> Draws:
        """Returns a source of random draws that is the same for all samples of a group. Each purpose has its `name`."""
        k = self.key
        return Draws(name, k.seed, k.purpose, k.task, k.prompt_id, k.visit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """The beginning of an episode: the messages that the policy is shown, and the tools that it is offered."""

    messages: list[Message]
    tools: list[Any] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The result of stepping an environment with an answer.

    `parts` are the parts of the reward by name, for the episode up to now: those of the last step count. None means
    that there is no reward yet. `cost` is subtracted from the reward. `earned` is a reward of this turn alone, which is
    added to that of the parts. If the episode is not `done`, `replies` are the messages before the policy's next turn.
    `calls` are the calls of tools in this turn, by outcome. `ending` is the limit that ended the conversation, as a
    Finish.
    """

    parts: dict[str, float] | None = None
    reason: str = ""
    cost: float = 0.0
    earned: float = 0.0
    replies: list[Message] = field(default_factory=list)
    done: bool = True
    calls: dict[str, int] = field(default_factory=dict)
    ending: str = ""


class Environment(Protocol):
    """One episode of a conversation with the policy."""

    def start(self, row: Row, draws: KeyedDraws) -> Opening:
        """Starts the episode of a row and returns the messages that the policy is shown. Called once, before any step.

        `draws` gives the episode its random numbers.
        """

    def step(self, answer: Answer) -> Step:
        """Takes the policy's next answer and returns its reward, or the messages that reply to it."""

    def close(self, answer: Answer, limit: Finish) -> Step:
        """Ends an episode that has no room for a further turn. `answer` is the newest one, which was stepped already.

        Returns the reward. It is called only if the last step had none.
        """


class SingleTurn:
    """The environment of a task: one prompt and one answer, which the task scores. A further step scores anew."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.row: Row = {}

    def start(self, row: Row, draws: KeyedDraws) -> Opening:
        """Keeps the row and returns the task's prompt for it."""
        self.row = row
        return Opening(messages=self.task.prompt(row))

    def step(self, answer: Answer) -> Step:
        """Scores the answer with the task's grader and returns its parts; the episode is done.

        Raises TaskError if the parts are not valid, and whatever the grader raises.
        """
        outcome = grade(self.task, self.row, answer)
        return Step(parts=outcome.parts, reason=outcome.reason)

    def close(self, answer: Answer, limit: Finish) -> Step:
        """Scores the newest answer once more."""
        return self.step(answer)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgainRules:
    """When and how another attempt is asked for."""

    attempts: int  # most further attempts after the first
    below: float  # another attempt follows a reward of at most this
    cost: float  # what each further attempt subtracts from the reward
    words: tuple[str, ...]  # the user's turn is one of these, drawn at random
    coefficients: dict[str, float]  # of the reward's parts


class ThinkAgain:
    """An environment that answers a low reward by a user's turn asking for another attempt. The last attempt counts."""

    def __init__(self, inner: Environment, rules: AgainRules) -> None:
        self.inner = inner
        self.rules = rules
        self.draws: KeyedDraws | None = None
        self.num_turns = 0

    def start(self, row: Row, draws: KeyedDraws) -> Opening:
        """Starts the inner environment and returns its first messages."""
        self.draws = draws
        return self.inner.start(row, draws)

    def step(self, answer: Answer) -> Step:
        """Steps the inner environment. If its reward is low and attempts are left, the step asks for another attempt.

        That happens only if the inner episode is done with a total reward of at most `rules.below`, and the answer was
        not cut off. Then the step keeps its parts, is not done, and replies with one of `rules.words`. `rules.cost`
        times the number of further attempts so far is added to the cost of every step.
        """
        assert self.draws is not None, "an episode is started before it is stepped"
        step, rules = self.inner.step(answer), self.rules
        self.num_turns += 1
        step = replace(step, cost=step.cost + rules.cost * (self.num_turns - 1))
        # An answer to which no part applies has no reward, so that it is not a low one.
        if not step.done or not step.parts:
            return step
        # An answer that was cut off has not ended its turn, so no user's turn can follow it.
        if self.num_turns > rules.attempts or answer.finish != Finish.STOP:
            return step
        if compute_total_reward(step.parts, rules.coefficients) > rules.below:
            return step
        words = self.draws.for_turn("again", self.num_turns).choice(rules.words)
        return replace(step, replies=[{"role": "user", "content": words}], done=False)

    def close(self, answer: Answer, limit: Finish) -> Step:
        """Closes the inner environment."""
        return self.inner.close(answer, limit)


def compute_total_reward(parts: Mapping[str, float], coefficients: Mapping[str, float]) -> float:
    """Returns the sum of the reward parts, each times its coefficient.

    A part without a coefficient has the coefficient 1; a coefficient without a part is ignored.

    >>> compute_total_reward({"correct": 1.0, "format": 0.5}, {"format": 2.0})
    2.0
    """
    return sum(coefficients.get(name, 1.0) * value for name, value in parts.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """An episode before its newest answer: its key and the earlier answers, enough to replay it in any worker."""

    key: Key
    answers: tuple[Answer, ...] = ()


class Episodes:
    """Table of the environments of the episodes under way in a scoring worker.

    `make` returns a new environment. If the table has no environment for an episode, or one that was given other
    answers than the episode's, a new one is made and replayed with the earlier answers. The number of answers is not
    enough to tell: keys repeat, and an earlier answer may have gone to another worker.
    """

    def __init__(self, make: Callable[[], Environment]) -> None:
        self.make = make
        # Each environment with a hash of the row and the answers that it was given.
        self._live: OrderedDict[Key, tuple[Environment, bytes]] = OrderedDict()

    def step(
        self, row: Row, past: Past, answer: Answer, before: Callable[[Answer], None] = lambda answer: None
    ) -> Step:
        """Steps the environment of an episode with its newest answer and returns the resulting step.

        `past` holds the episode's key and earlier answers: with them the episode is replayed first if the table has no
        environment for it, or one with another history. `before` is called with every answer before the environment
        gets it, and with the newest one also before a new environment is started. The environment stays in the table
        only if the episode is not done; an exception removes it, and beyond MAX_LIVE the one stepped longest ago is
        dropped.
        """
        # Hashed before the step, because a grader may change the values that it is given.
        history = _hash_history(row, (*past.answers, answer))
        environment = self._pop_environment(row, past.key, past.answers, before, first=answer)
        before(answer)
        step = environment.step(answer)
        if not step.done:
            self._live[past.key] = (environment, history)
            if len(self._live) > MAX_LIVE:
                self._live.popitem(last=False)
        return step

    def close(self, row: Row, past: Past, answer: Answer, limit: Finish, before: Callable[[Answer], None]) -> Step:
        """Ends an episode whose newest answer was stepped already, because of a limit. Returns the last step.

        The parameters are those of `step`.
        """
        environment = self._pop_environment(row, past.key, (*past.answers, answer), before, first=answer)
        before(answer)
        return environment.close(answer, limit)

    def _pop_environment(
        self, row: Row, key: Key, answers: tuple[Answer, ...], before: Callable[[Answer], None], first: Answer
    ) -> Environment:
        """Returns the environment that was given these answers, from the table or replayed. It leaves the table.

        `before` is called with `first` before a new environment is started, and with every answer that is replayed.
        """
        # The environment leaves the table while it works: after an exception its state cannot be used any more.
        environment, history = self._live.pop(key, (None, b""))
        if environment is not None and history == _hash_history(row, answers):
            return environment
        environment = self.make()
        before(first)
        environment.start(row, KeyedDraws(key))
        for earlier in answers:
            before(earlier)
            environment.step(earlier)
        return environment

    def __len__(self) -> int:
        return len(self._live)


def _hash_history(row: Row, answers: tuple[Answer, ...]) -> bytes:
    """Returns a hash of everything that an environment was given: the row and all fields of the answers."""
    history = [row, *([getattr(a, f.name) for f in dataclasses.fields(a)] for a in answers)]
    return hashlib.blake2b(json.dumps(history, default=repr).encode(), digest_size=16).digest()
