"""The task textarena with a stand-in for the package: moves, rewards, random numbers of its own, games that fail.

`tests/peers/test_textarena.py` plays games of the real package.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import TaskError
from cohort.tasks.base import get_task, load_rows
from cohort.tasks.conversation import ConversationEnvironment, ConversationRules
from cohort.tasks.environment import KeyedDraws
from cohort.tasks.textarena import TextArena
from cohort.types import Answer, Key

PACKAGE = '''
import random
from textarena.envs.registration import ENV_REGISTRY

class SinglePlayerState:
    def __init__(self, seed):
        random.seed(seed)
        self.said = []

class Dice:
    """Guess what the next throw is: it is thrown after the guess, from the global random numbers."""
    def reset(self, num_players, seed):
        assert num_players == 1
        self.state = SinglePlayerState(seed)
        self.state.said.append((-1, f"Begin with {random.randint(1, 1000)}.", "PROMPT"))
        self.rewards = None

    def get_observation(self):
        said, self.state.said = self.state.said, []
        return 0, said

    def step(self, action):
        self.state.said.append((0, action, "PLAYER_ACTION"))
        if action == "crash":
            raise RuntimeError("a bug of the game")
        if action == "quiet":
            return False, {}
        if action.startswith("end "):
            self.rewards = {0: float(action[4:])}
            return True, {}
        if action == "confused":
            self.rewards = {0: "not allowed"}
            return True, {}
        self.state.said.append((-1, f"Thrown: {random.randint(1, 1000)}", "GAME_MESSAGE"))
        return False, {}

    def close(self):
        return self.rewards, {0: {"reason": f"because of {self.rewards[0]}"}}

class Pair(Dice):
    def reset(self, num_players, seed):
        super().reset(num_players, seed)
        # The state of a game for two has another class.
        self.state = type("TwoPlayerState", (), {"said": self.state.said})()

class Missing(Dice):
    def reset(self, num_players, seed):
        raise LookupError("Resource words not found.\\n  Please download it.")

KINDS = {"Dice-v0": Dice, "Dice-v0-raw": Dice, "Pair-v0": Pair, "Missing-v0": Missing}
ENV_REGISTRY.update(KINDS)
asked = []

def make(name):
    asked.append(name)
    return KINDS[name]()
'''
RULES = ConversationRules(max_turns=9, max_calls=9, format="hermes", seconds=5.0, characters=100)


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package of the name textarena, with games that are made for the test."""
    folder = tmp_path / "textarena" / "envs"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text(PACKAGE)
    (folder / "__init__.py").write_text("")
    (folder / "registration.py").write_text("ENV_REGISTRY = {}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "textarena"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "textarena"]:
        del sys.modules[name]


def begin(seed: int = 5, game: str = "Dice-v0") -> tuple[ConversationEnvironment, str]:
    """Returns an episode of a game, and its first message."""
    environment = ConversationEnvironment(TextArena(game=game), RULES)
    key = Key(seed=0, purpose="train", task="textarena", prompt_id="x", visit=0, sample=0)
    [message] = environment.start({"id": "x", "seed": seed}, KeyedDraws(key)).messages
    return environment, message["content"]


def move(episode: tuple[ConversationEnvironment, str], text: str) -> Any:
    """Makes a move in an episode."""
    environment, opening = episode
    talk = [{"role": "user", "content": opening}, {"role": "assistant", "content": text}]
    return environment.step(Answer(text=text, full=text, finish="stop", num_tokens=1, conversation=talk))


def test_rows_are_seeds_that_splits_do_not_share() -> None:
    assert get_task("textarena") is TextArena
    task = TextArena(train_size=40, test_size=20)
    train, test = load_rows(task, "train"), load_rows(task, "test")
    assert len(train) == 40 and len(test) == 20 and train == load_rows(task, "train")
    assert not {row["seed"] for row in train} & {row["seed"] for row in test}
    assert load_rows(replace(task, game="Other-v0"), "train") != train
    with pytest.raises(TaskError, match="train_size and test_size above 0"):
        TextArena(train_size=0)


def test_a_game_is_a_conversation_without_the_players_own_words() -> None:
    episode = begin()
    assert episode[1].startswith("Begin with ")
    step = move(episode, "<think>end 1</think>4")
    assert not step.done and len(step.replies) == 1 and step.replies[0]["content"].startswith("Thrown: ")
    assert move(episode, "quiet").replies == [{"role": "user", "content": "Make your move."}]
    won = move(episode, "end 1")
    assert (won.done, won.parts, won.reason) == (True, {"correct": 1.0, "reward": 1.0}, "because of 1.0")
    assert move(begin(), "end 0.75").parts == {"correct": 0.0, "reward": 0.75}
    assert move(begin(), "end -1").parts == {"correct": 0.0, "reward": -1.0}
    # The package sometimes has a text in the place of the reward.
    confused = move(begin(), "confused")
    assert confused.parts == {"correct": 0.0, "reward": 0.0} and "not allowed" in confused.reason
    assert sys.modules["textarena"].asked[0] == "Dice-v0-raw"


def test_episodes_have_random_numbers_of_their_own() -> None:
    random.seed(1)
    expected = random.Random(1).random()
    alone = begin(5)
    heard = [move(alone, "4").replies for _ in range(4)]
    first, other, again = begin(5), begin(6), begin(5)
    assert first[1] == again[1] == alone[1] != other[1]
    mixed = []
    for _ in range(4):
        move(other, "4")
        mixed.append(move(first, "4").replies)
        random.random()
        move(other, "quiet")
    assert mixed == heard and len({str(reply) for reply in heard}) > 1
    random.seed(1)
    move(again, "4")
    assert random.random() == expected, "a game has changed the random numbers of others"


def test_games_that_cannot_be_played_are_refused_by_name() -> None:
    for game, message in (
        ("Missing-v0", r"the game Missing-v0 .* does not start here \(LookupError: Resource words not found\. Please"),
        ("Pair-v0", "the game Pair-v0 of textarena is not for one player"),
        ("Dice-v1", r'textarena has no game "Dice-v1"\. Did you mean "Dice-v0"\?'),
    ):
        with pytest.raises(TaskError, match=message):
            begin(game=game)


def test_a_crash_of_a_game_is_no_verdict() -> None:
    with pytest.raises(RuntimeError, match="a bug of the game"):
        move(begin(), "crash")
