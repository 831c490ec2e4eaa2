"""Environments: single turns, second attempts, and the replay of episodes from their key and answers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from cohort.tasks import environment
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import load_rows, make_plain_answer
from cohort.tasks.draws import Draws
from cohort.tasks.environment import (
    AgainRules,
    Episodes,
    KeyedDraws,
    Past,
    SingleTurn,
    Step,
    ThinkAgain,
    compute_total_reward,
)
from cohort.tasks.grading import grade
from cohort.types import Answer, Key

KEY = Key(seed=5, purpose="train", task="arithmetic", prompt_id="p", visit=2, sample=1)
RULES = AgainRules(attempts=3, below=0.5, cost=0.25, words=tuple("abcdefg"), coefficients={"format": 0.0})
TASK = Arithmetic(train_size=4, test_size=4)
ROW = load_rows(TASK, "train")[0]


def make_think_again(rules: AgainRules = RULES) -> ThinkAgain:
    return ThinkAgain(SingleTurn(TASK), rules)


def test_a_task_is_an_environment_of_one_step():
    single, answer = SingleTurn(TASK), make_plain_answer(TASK.gold(ROW))
    opening = single.start(ROW, KeyedDraws(KEY))
    assert opening.messages == TASK.prompt(ROW) and opening.tools == []
    outcome = grade(TASK, ROW, answer)
    assert single.step(answer) == Step(parts=outcome.parts, reason=outcome.reason, done=True)


def test_words_are_drawn_by_the_key_and_the_turn():
    played = make_think_again()
    assert played.start(ROW, KeyedDraws(KEY)).messages == TASK.prompt(ROW)
    replies = [played.step(make_plain_answer("no")).replies[0]["content"] for _ in range(3)]
    assert replies == [Draws("again", 5, "train", "arithmetic", "p", 2, 1, n).choice(RULES.words) for n in (1, 2, 3)]
    last = played.step(make_plain_answer("no"))
    assert last.done and last.replies == [] and last.cost == 0.75


def test_a_high_reward_a_cut_answer_and_the_last_attempt_end_it():
    gold = make_plain_answer(TASK.gold(ROW))
    for answer, done in (
        (gold, True),
        (make_plain_answer("no"), False),
        (replace(make_plain_answer("no"), finish="length"), True),
    ):
        played = make_think_again()
        played.start(ROW, KeyedDraws(KEY))
        step = played.step(answer)
        assert step.done is done and bool(step.replies) is not done and step.cost == 0.0
        assert step.parts == grade(TASK, ROW, answer).parts


def test_coefficients_decide_the_total_reward():
    parts = {"correct": 0.0, "format": 1.0}
    assert compute_total_reward(parts, {}) == 1.0 and compute_total_reward(parts, RULES.coefficients) == 0.0
    assert compute_total_reward(parts, {"format": 0.25, "correct": 9.0}) == 0.25


def test_an_answer_without_a_reward_is_not_a_low_one():
    """No part applies to it, so it has failed, and no other attempt is asked for."""
    for parts, done in (({}, True), ({"score": 0.0}, False)):
        inner = SimpleNamespace(
            start=lambda row, draws: None, step=lambda answer, parts=parts: Step(parts=parts, done=True)
        )
        played = ThinkAgain(inner, RULES)
        played.start(ROW, KeyedDraws(KEY))
        assert played.step(make_plain_answer("x")).done is done


class Counting:
    """An environment that repeats all answers that it was given, until an answer is "end". Counts its instances."""

    made = 0

    def __init__(self) -> None:
        Counting.made += 1
        self.given: list[str] = []

    def start(self, row, draws) -> None:
        self.given.append(draws.key.prompt_id)

    def step(self, answer: Answer) -> Step:
        if answer.text == "bad":
            raise ValueError("bad")
        self.given.append(answer.text)
        return Step(replies=[{"role": "user", "content": " ".join(self.given)}], done=answer.text == "end")


def past(*texts: str, prompt: str = "p") -> Past:
    """Returns an episode with these earlier answers."""
    return Past(key=replace(KEY, prompt_id=prompt), answers=tuple(map(make_plain_answer, texts)))


def test_an_episode_continues_in_its_table_and_is_replayed_in_another():
    Counting.made = 0
    here, elsewhere = Episodes(Counting), Episodes(Counting)
    assert here.step({}, past(), make_plain_answer("one")).replies[0]["content"] == "p one"
    assert here.step({}, past("one"), make_plain_answer("two")).replies[0]["content"] == "p one two"
    assert Counting.made == 1
    assert elsewhere.step({}, past("one", "two"), make_plain_answer("three")).replies[0]["content"] == "p one two three"
    assert here.step({}, past("one", "two", "three"), make_plain_answer("four")).replies[0]["content"] == (
        "p one two three four"  # the environment in this table was not given the third answer
    )
    assert Counting.made == 3


def get_reply(step: Step) -> str:
    """Returns the text of the first reply of a step."""
    return step.replies[0]["content"]


def test_an_environment_that_was_given_other_answers_is_not_continued():
    """Keys repeat, and the answers of an episode go to any worker: equally many answers need not be the same ones."""
    here, elsewhere = Episodes(Counting), Episodes(Counting)
    assert get_reply(here.step({}, past(), make_plain_answer("X"))) == "p X"
    assert (
        get_reply(elsewhere.step({}, past(), make_plain_answer("Y"))) == "p Y"
    )  # the same key again, at another worker
    assert get_reply(here.step({}, past("Y"), make_plain_answer("Z"))) == "p Y Z"
    assert get_reply(elsewhere.step({}, past("Y"), make_plain_answer("Z"))) == "p Y Z"
    assert get_reply(here.step({}, past("Y", "Q"), make_plain_answer("R"))) == "p Y Q R"


@pytest.mark.parametrize(
    "other", [{"finish": "length"}, {"full": "<think>one"}, {"num_tokens": 9}, {"conversation": [{"role": "user"}]}]
)
def test_all_of_an_answer_is_compared(other):
    one, two = make_plain_answer("one"), make_plain_answer("two")
    for answer, made in ((one, 1), (replace(one, **other), 2)):
        Counting.made, episodes = 0, Episodes(Counting)
        episodes.step({}, past(), one)
        episodes.step({}, replace(past(), answers=(answer,)), two)
        assert Counting.made == made


def test_the_row_is_compared_too():
    Counting.made = 0
    episodes = Episodes(Counting)
    episodes.step({"n": 1}, past(), make_plain_answer("one"))
    episodes.step({"n": 1}, past("one"), make_plain_answer("two"))
    assert Counting.made == 1
    episodes.step({"n": 2}, past("one", "two"), make_plain_answer("three"))
    assert Counting.made == 2


class Scribbling(Counting):
    """An environment that changes the answers that it is given."""

    def step(self, answer: Answer) -> Step:
        answer.conversation.append({"role": "user", "content": "mine"})
        return super().step(answer)


def test_an_environment_that_changes_an_answer_is_still_continued():
    Counting.made = 0
    episodes = Episodes(Scribbling)
    episodes.step({}, past(), make_plain_answer("one"))
    assert get_reply(episodes.step({}, past("one"), make_plain_answer("two"))) == "p one two"
    assert Counting.made == 1


def test_an_environment_that_raised_or_ended_is_not_kept():
    episodes = Episodes(Counting)
    episodes.step({}, past(), make_plain_answer("one"))
    with pytest.raises(ValueError, match="bad"):
        episodes.step({}, past("one"), make_plain_answer("bad"))
    assert len(episodes) == 0
    assert episodes.step({}, past("one"), make_plain_answer("two")).replies[0]["content"] == "p one two"
    episodes.step({}, past("one", "two"), make_plain_answer("end"))
    assert len(episodes) == 0


def test_the_table_is_bounded_and_a_dropped_episode_is_replayed(monkeypatch):
    monkeypatch.setattr(environment, "MAX_LIVE", 3)
    episodes = Episodes(Counting)
    for n in range(8):
        episodes.step({}, past(prompt=f"p{n}"), make_plain_answer("one"))
    assert len(episodes) == 3
    told: list[str] = []
    step = episodes.step(
        {}, past("one", prompt="p0"), make_plain_answer("two"), lambda answer: told.append(answer.text)
    )
    assert step.replies[0]["content"] == "p0 one two" and told[-2:] == ["one", "two"]
