"""The task textarena: games for one player of the package textarena, as conversations.

The prompt is what the game shows first, and each answer is a move. A reply has what the game says to it. Moves that the
game does not accept are its own matter: it warns, or ends the game. What the package itself raises is a failure.

Parts: `correct` is 1 if the game gave its full reward, which is 1, else 0. `reward` is the game's reward as it is. For
many games it says how far the player came, and it may be negative after moves that are not allowed.

Games draw with Python's and NumPy's global random numbers. Every episode has a state of both of its own, which begins
with the seed of its row, so that episodes in one process do not disturb each other and can be played again.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from cohort.errors import TaskError, suggest_name
from cohort.tasks.base import require, task
from cohort.tasks.draws import Draws
from cohort.tasks.environment import KeyedDraws, Step
from cohort.types import Answer, Row

PACKAGE = "textarena"
EXTRA = "cohort[textarena]"
PLAYER = 0  # the number of the only player
FULL_REWARD = 1.0
# Ends of names under which the package has the same game again: without, and with other texts around its messages.
VARIANTS = ("-raw", "-train")


@task("textarena")
@dataclass(frozen=True, kw_only=True)
class TextArena:
    """Games of the package textarena for one player."""

    game: str = "GuessTheNumber-v0"
    """Name of the game; docs/environments.md lists those that start offline."""
    train_size: int = 300
    """Number of games to train on. Each is started once when a run begins."""
    test_size: int = 50
    """Number of other games, for evaluation."""

    name: ClassVar[str]
    accuracy: ClassVar[str] = "correct"
    parts: ClassVar[tuple[str, ...]] = ("correct", "reward")
    packages: ClassVar[Mapping[str, str]] = {PACKAGE: EXTRA}

    def __post_init__(self) -> None:
        require("textarena", bool(self.game), "game to be the name of a game")
        require("textarena", self.train_size > 0 and self.test_size > 0, "train_size and test_size above 0")

    def rows(self, split: str) -> list[Row]:
        """Returns one row per game: the seed from which it draws."""
        size = self.train_size if split == "train" else self.test_size
        seeds = Draws("textarena", self.game, split)
        return [{"id": f"{split}{number}", "seed": seeds.below(2**31)} for number in range(size)]

    def environment(self) -> GameEnvironment:
        """Returns a new game."""
        return GameEnvironment(self.game)


class GameEnvironment:
    """One game, from its first message to its reward."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._game: Any = None
        self._states: Any = None  # of Python's and NumPy's random numbers, between two calls of the game

    def start(self, row: Row, draws: KeyedDraws) -> str:
        """Starts the game of a row and returns its first message.

        Raises TaskError, with the reason, if the package has no such game, or if it does not start here.
        """
        self._states = _make_random_states(row["seed"])
        module = importlib.import_module(PACKAGE)
        name = find_game(self.name, importlib.import_module("textarena.envs.registration").ENV_REGISTRY)
        try:
            with self._own_random_numbers():
                self._game = module.make(name)
                self._game.reset(num_players=1, seed=row["seed"])
                text = self._read_messages()
        # Games raise anything: for a missing word list, a package that they need, or another number of players.
        except Exception as error:
            raise TaskError(
                f"the game {self.name} of textarena does not start here ({describe_problem(error)}); choose another "
                "--task.game"
            ) from error
        if not isinstance(self._game.state, module.SinglePlayerState) or not text.strip():
            raise TaskError(f"the game {self.name} of textarena is not for one player; choose another --task.game")
        return text

    def step(self, answer: Answer) -> Step:
        """Makes a move and returns what the game says to it, or its reward at the end."""
        # What a model thinks is not its move.
        move = answer.text.rpartition("</think>")[2]
        with self._own_random_numbers():
            done, _ = self._game.step(move)
            text = "" if done else self._read_messages()
        if not done:
            return Step(replies=[{"role": "user", "content": text.strip() or "Make your move."}], done=False)
        rewards, about = self._game.close()
        found = (rewards or {}).get(PLAYER)
        # Some games mistake the reward for the reason when they end after moves that are not allowed.
        reward = float(found) if isinstance(found, Real) else 0.0
        parts = {"correct": float(reward >= FULL_REWARD), "reward": reward}
        return Step(parts=parts, reason=str(about.get(PLAYER, {}).get("reason") or ""))

    def _read_messages(self) -> str:
        """Returns what the game has said since the last call, without the player's own words."""
        _, seen = self._game.get_observation()
        if isinstance(seen, str):
            return seen
        return "\n\n".join(str(text) for sender, text, *_ in seen if sender != PLAYER)

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Context in which the global random numbers are those of this game."""
        before = _swap_random_states(self._states)
        try:
            yield
        finally:
            self._states = _swap_random_states(before)


def _make_random_states(seed: int) -> tuple[Any, Any]:
    """Returns the states of Python's and NumPy's random numbers that begin with a seed."""
    import numpy as np  # here, because settings are read without it

    return random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()


def _swap_random_states(states: tuple[Any, Any]) -> tuple[Any, Any]:
    """Sets the states of Python's and NumPy's random numbers, and returns those before."""
    import numpy as np

    before = random.getstate(), np.random.get_state()
    random.setstate(states[0])
    np.random.set_state(states[1])
    return before


def find_game(name: str, registry: Mapping[str, Any]) -> str:
    """Returns the name under which the package has a game without other texts around its messages.

    Raises TaskError if there is no such game.
    """
    if name not in registry:
        plain = [known for known in registry if not known.endswith(VARIANTS)]
        raise TaskError(
            f'textarena has no game "{name}".{suggest_name(name, plain)} Correct --task.game; docs/environments.md '
            "lists the games that start offline."
        )
    return f"{name}-raw" if f"{name}-raw" in registry else name


def describe_problem(error: BaseException) -> str:
    """Returns the kind and the first words of an exception, in one line."""
    words = " ".join(str(error).replace("*", "").split())
    return f"{type(error).__name__}: {words[:160]}" if words else type(error).__name__
