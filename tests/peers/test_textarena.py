"""Games of the package textarena, played through the task of the same name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("textarena")

from cohort.errors import TaskError
from cohort.scoring.start import start_scorer
from cohort.tasks.base import load_rows
from cohort.tasks.conversation import ConversationRules, make_opening
from cohort.tasks.environment import Past
from cohort.tasks.textarena import GameEnvironment, TextArena
from cohort.types import Answer, Key

pytestmark = pytest.mark.peers

RULES = ConversationRules(max_turns=30, max_calls=9, format="hermes", seconds=5.0, characters=100)
OFFLINE = (
    "2048-v0-mega-easy Bandit-v0 Blackjack-v0 Countdown-v0 Crosswords-v0 Cryptarithm-v0 FifteenPuzzle-v0 FrozenLake-v0 "
    "GuessTheNumber-v0 LightsOut-v0 LogicPuzzle-v0 Mastermind-v0 Minesweeper-v0 PegJump-v0 RushHour-v0 Secretary-v0 "
    "Set-v0 Slitherlink-v0 Sokoban-v0 Sudoku-v0 ThreeCardMonte-v0 TowerOfHanoi-v0"
)


def answer(text: str, talk: list[dict[str, Any]] | None = None) -> Answer:
    said = [*(talk or []), {"role": "assistant", "content": text}]
    return Answer(text=text, full=text, finish="stop", num_tokens=1, conversation=said)


def search_number(game: GameEnvironment, row: dict[str, Any]) -> Any:
    """Plays GuessTheNumber by halving, and returns the last step."""
    assert "between 1 and 20" in game.start(row, None)  # type: ignore[arg-type]
    low, high = 1, 20
    while True:
        guess = (low + high) // 2
        step = game.step(answer(f"I say [{guess}]."))
        if step.done:
            return step
        said = step.replies[0]["content"]
        assert re.search("higher|lower", said) and f"[{guess}]" not in said
        low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)


def test_a_number_is_found_and_two_bad_moves_lose() -> None:
    rows = load_rows(TextArena(test_size=8), "test")
    steps = [search_number(GameEnvironment("GuessTheNumber-v0"), row) for row in rows]
    assert all(step.parts == {"correct": 1.0, "reward": 1.0} for step in steps)
    game = GameEnvironment("GuessTheNumber-v0")
    game.start(rows[0], None)  # type: ignore[arg-type]
    warned = game.step(answer("no number"))
    assert not warned.done and "invalid move" in warned.replies[0]["content"]
    lost = game.step(answer("no number"))
    assert lost.done and lost.parts["correct"] == 0.0 and "Invalid Move" in lost.reason


@pytest.mark.parametrize("name", OFFLINE.split())
def test_games_start_and_answer(name: str) -> None:
    game = GameEnvironment(name)
    assert game.start({"id": "0", "seed": 3}, None)  # type: ignore[arg-type]
    for _ in range(30):
        step = game.step(answer("[0]"))
        if step.done:
            break
        assert step.replies[0]["content"].strip()
    if step.done:
        assert set(step.parts) == {"correct", "reward"}


def test_games_begin_alike_in_every_process() -> None:
    program = (
        "import json, sys; from cohort.tasks.textarena import GameEnvironment; "
        "print('\\n' + json.dumps([GameEnvironment(n).start({'id': '0', 'seed': 3}, None) for n in sys.argv[1:]]))"
    )
    seen = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program, *OFFLINE.split()]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        seen.append(json.loads(done.stdout.strip().splitlines()[-1]))
    assert seen[0] == seen[1]


def test_an_episode_in_scoring_workers() -> None:
    task = TextArena(train_size=4)
    row = load_rows(task, "train")[0]
    opening = make_opening(task, row).messages
    key = Key(seed=0, purpose="train", task="textarena", prompt_id=row["id"], visit=0, sample=0)
    first = answer("[10]", opening)
    with start_scorer(task, rules=RULES) as pool:
        pool.submit("a", row, first, Past(key=key))
        outcomes: dict[str, Any] = {}
        while not outcomes:
            outcomes = dict(pool.poll(5.0))
    assert outcomes["a"].replies or outcomes["a"].parts["correct"] == 1.0


def test_games_of_others_are_refused() -> None:
    with pytest.raises(TaskError, match=r"TicTacToe-v0 of textarena does not start here .*players"):
        GameEnvironment("TicTacToe-v0").start({"id": "0", "seed": 3}, None)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match='no game "GuessTheNumber"'):
        GameEnvironment("GuessTheNumber").start({"id": "0", "seed": 3}, None)  # type: ignore[arg-type]
