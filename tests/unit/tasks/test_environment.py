"""Environments: one episode each, the same whenever it is played."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cohort.tasks import environment
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import grade, load_rows, plain_answer
from cohort.tasks.draws import Draws
from cohort.tasks.environment import AgainRules, Episodes, KeyedDraws, Past, SingleTurn, Step, ThinkAgain, total_reward
from cohort.types import Answer, Key

KEY = Key(seed=5, purpose="train", task="arithmetic", prompt_id="p", visit=2, sample=1)
RULES = AgainRules(attempts=3, below=0.5, cost=0.25, words=tuple("abcdefg"), coefficients={"format": 0.0})
TASK = Arithmetic(train_size=4, test_size=4)
ROW = load_rows(TASK, "train")[0]


def again(rules: AgainRules = RULES) -> ThinkAgain:
    return ThinkAgain(SingleTurn(TASK), rules)


def test_a_task_is_an_environment_of_one_step():
    single, answer = SingleTurn(TASK), plain_answer(TASK.gold(ROW))
    opening = single.start(ROW, KeyedDraws(KEY))
    assert opening.messages == TASK.prompt(ROW) and opening.tools == []
    outcome = grade(TASK, ROW, answer)
    assert single.step(answer) == Step(parts=outcome.parts, reason=outcome.reason, done=True)


def test_words_are_drawn_by_the_key_and_the_turn():
    played = again()
    assert played.start(ROW, KeyedDraws(KEY)).messages == TASK.prompt(ROW)
    said = [played.step(plain_answer("no")).replies[0]["content"] for _ in range(3)]
    assert said == [Draws("again", 5, "train", "arithmetic", "p", 2, 1, n).choice(RULES.words) for n in (1, 2, 3)]
    last = played.step(plain_answer("no"))
    assert last.done and last.replies == [] and last.cost == 0.75


def test_a_high_reward_a_cut_answer_and_the_last_attempt_end_it():
    gold = plain_answer(TASK.gold(ROW))
    for answer, done in (
        (gold, True),
        (plain_answer("no"), False),
        (replace(plain_answer("no"), finish="length"), True),
    ):
        played = again()
        played.start(ROW, KeyedDraws(KEY))
        step = played.step(answer)
        assert step.done is done and bool(step.replies) is not done and step.cost == 0.0
        assert step.parts == grade(TASK, ROW, answer).parts


def test_the_reward_that_decides_is_the_runs():
    parts = {"correct": 0.0, "format": 1.0}
    assert total_reward(parts, {}) == 1.0 and total_reward(parts, RULES.coefficients) == 0.0
    assert total_reward(parts, {"format": 0.25, "correct": 9.0}) == 0.25


class Counting:
    """Counts what it is told; goes on for ever."""

    made = 0

    def __init__(self) -> None:
        Counting.made += 1
        self.heard: list[str] = []

    def start(self, row, draws) -> None:
        self.heard.append(draws.key.prompt_id)

    def step(self, answer: Answer) -> Step:
        if answer.text == "bad":
            raise ValueError("bad")
        self.heard.append(answer.text)
        return Step(replies=[{"role": "user", "content": " ".join(self.heard)}], done=answer.text == "end")


def past(*texts: str, prompt: str = "p") -> Past:
    return Past(key=replace(KEY, prompt_id=prompt), answers=tuple(map(plain_answer, texts)))


def test_an_episode_goes_on_where_it_is_and_is_played_again_where_it_is_not():
    Counting.made = 0
    here, elsewhere = Episodes(Counting), Episodes(Counting)
    assert here.step({}, past(), plain_answer("one")).replies[0]["content"] == "p one"
    assert here.step({}, past("one"), plain_answer("two")).replies[0]["content"] == "p one two"
    assert Counting.made == 1
    assert elsewhere.step({}, past("one", "two"), plain_answer("three")).replies[0]["content"] == "p one two three"
    assert here.step({}, past("one", "two", "three"), plain_answer("four")).replies[0]["content"] == (
        "p one two three four"  # what is here has not seen the third
    )
    assert Counting.made == 3


def said(step: Step) -> str:
    return step.replies[0]["content"]


def test_an_environment_that_heard_other_answers_is_not_gone_on_with():
    """Keys repeat, and an episode's answers go to any worker: as many answers are not the same answers."""
    here, elsewhere = Episodes(Counting), Episodes(Counting)
    assert said(here.step({}, past(), plain_answer("X"))) == "p X"
    assert said(elsewhere.step({}, past(), plain_answer("Y"))) == "p Y"  # the same key again, at another worker
    assert said(here.step({}, past("Y"), plain_answer("Z"))) == "p Y Z"
    assert said(elsewhere.step({}, past("Y"), plain_answer("Z"))) == "p Y Z"
    assert said(here.step({}, past("Y", "Q"), plain_answer("R"))) == "p Y Q R"


@pytest.mark.parametrize(
    "other", [{"finish": "length"}, {"full": "<think>one"}, {"num_tokens": 9}, {"conversation": [{"role": "user"}]}]
)
def test_all_of_an_answer_is_compared(other):
    one, two = plain_answer("one"), plain_answer("two")
    for answer, made in ((one, 1), (replace(one, **other), 2)):
        Counting.made, episodes = 0, Episodes(Counting)
        episodes.step({}, past(), one)
        episodes.step({}, replace(past(), answers=(answer,)), two)
        assert Counting.made == made


def test_the_row_is_compared_too():
    Counting.made = 0
    episodes = Episodes(Counting)
    episodes.step({"n": 1}, past(), plain_answer("one"))
    episodes.step({"n": 1}, past("one"), plain_answer("two"))
    assert Counting.made == 1
    episodes.step({"n": 2}, past("one", "two"), plain_answer("three"))
    assert Counting.made == 2


class Scribbling(Counting):
    """Changes what it is given."""

    def step(self, answer: Answer) -> Step:
        answer.conversation.append({"role": "user", "content": "mine"})
        return super().step(answer)


def test_an_environment_that_changes_an_answer_is_still_gone_on_with():
    Counting.made = 0
    episodes = Episodes(Scribbling)
    episodes.step({}, past(), plain_answer("one"))
    assert said(episodes.step({}, past("one"), plain_answer("two"))) == "p one two"
    assert Counting.made == 1


def test_what_raised_or_ended_is_not_kept():
    episodes = Episodes(Counting)
    episodes.step({}, past(), plain_answer("one"))
    with pytest.raises(ValueError, match="bad"):
        episodes.step({}, past("one"), plain_answer("bad"))
    assert len(episodes) == 0
    assert episodes.step({}, past("one"), plain_answer("two")).replies[0]["content"] == "p one two"
    episodes.step({}, past("one", "two"), plain_answer("end"))
    assert len(episodes) == 0


def test_memory_is_bounded_and_what_was_dropped_goes_on(monkeypatch):
    monkeypatch.setattr(environment, "MOST_LIVE", 3)
    episodes = Episodes(Counting)
    for n in range(8):
        episodes.step({}, past(prompt=f"p{n}"), plain_answer("one"))
    assert len(episodes) == 3
    told: list[str] = []
    step = episodes.step({}, past("one", prompt="p0"), plain_answer("two"), lambda answer: told.append(answer.text))
    assert step.replies[0]["content"] == "p0 one two" and told[-2:] == ["one", "two"]
