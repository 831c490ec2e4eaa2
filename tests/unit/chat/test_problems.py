"""Problems of a task in a chat: verdicts, failures of the grader, and answers that were cut."""

from __future__ import annotations

from contextlib import closing

import pytest

from cohort.chat.conversation import Exchange, ModelTurn
from cohort.chat.problems import TaskProblems, make_answer
from cohort.config.schema import EvalConfig
from cohort.config.scoring import ScoringConfig
from cohort.errors import ConfigError, TaskError
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.base import load_rows
from cohort.tasks.countdown import Countdown
from cohort.tasks.stream import TaskStream
from cohort.types import Finish
from tests.helpers.faulty_task import Faulty
from tests.helpers.recorded_runs import recorded_run


def make_turn(text, finish=Finish.STOP, forced=""):
    return ModelTurn(asked=(1,), restarts=True, written=(2, 3), text=text, finish=finish, forced_text=forced)


def test_verdicts_have_parts_and_reasons():
    with closing(TaskProblems(Countdown(test_size=2), "test")) as problems:
        row, messages = problems.take_row()
        gold = Countdown().gold(row)
        turns = (make_turn(gold), make_turn("no idea"), make_turn("<ans", Finish.ABORT), None)
        scored = problems.score(Exchange(messages=tuple(messages), turns=turns, row=row["id"]), lambda: False)
        told = [problems.describe_outcome(turn) for turn in scored.turns]
        assert told[0] == "RIGHT (correct 1, format 1)"
        assert told[1].startswith("WRONG (correct 0, format 0)\n") and told[2:] == ["not scored", "not scored"]
        # What the user cut, and what a model did not answer, is not counted against it.
        assert scored.counts == ((1, 1), (0, 1), (0, 0), (0, 0))
        problems.score(Exchange(messages=tuple(messages), turns=turns, row=row["id"], attempt=1), lambda: False)
        assert problems.num_scored == {0: 1, 1: 1}
        problems.take_row()
        with pytest.raises(ConfigError, match="these were all 2 test problems of countdown"):
            problems.take_row()


def test_scoring_stops_when_the_user_wants_it():
    with closing(TaskProblems(Countdown(test_size=1), "test")) as problems:
        row, messages = problems.take_row()
        exchange = Exchange(messages=tuple(messages), turns=(make_turn("x"),), row=row["id"])
        assert problems.score(exchange, lambda: True).turns[0].outcome is None
        assert problems.score(exchange, lambda: False).turns[0].outcome is not None


def test_a_forced_beginning_belongs_to_the_answer():
    prompt = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>"})
    answer = make_answer(Exchange(messages=prompt, turns=(), row="1"), make_turn("ok", forced="<think>"))
    assert (answer.text, answer.full, answer.num_tokens) == ("ok", "<think>ok", 2)
    assert [message["content"] for message in answer.conversation] == ["q", "<think>ok"]


def test_a_grader_that_fails_gives_no_verdict():
    with closing(TaskProblems(Faulty(fault="raising"), "test")) as problems:
        row, messages = problems.take_row()
        exchange = Exchange(messages=tuple(messages), turns=(make_turn("x"),), row=row["id"])
        scored = problems.score(exchange, lambda: False)
        assert problems.describe_outcome(scored.turns[0]).startswith("not scored, because the grader failed: ")
        assert not problems.num_scored and not problems.num_right


def test_validation_problems_are_those_that_a_run_keeps_apart():
    task = Countdown(train_size=200)
    with closing(TaskProblems(task, "validation", 0.2)) as problems:
        stream = TaskStream(task, None, 0, "train", validation_share=0.2)
        trained = {row["id"] for row in stream._rows}
        shown = {problems.take_row()[0]["id"] for _ in range(len(problems._rows))}
    assert shown and not shown & trained
    assert shown | trained == {row["id"] for row in load_rows(task, "train")}
    with pytest.raises(TaskError, match="no validation rows: they are a share of 1e-09"):
        TaskProblems(task, "validation", 1e-9)


def test_the_split_of_a_run_is_told(tmp_path):
    apart = recorded_run(tmp_path / "apart", {}, eval=EvalConfig(split="validation", validation_share=0.2))
    plain = recorded_run(tmp_path / "plain", {})

    def tell(run, split, share=0.1, task=None):
        with closing(TaskProblems(task or Arithmetic(train_size=100), split, share)) as problems:
            return problems.describe_split("m", run)

    assert tell(apart, "test") == (
        "m was evaluated on the validation split. These are test problems; --split validation --validation-share 0.2 "
        "shows the others."
    )
    assert "--validation-share 0.2 shows it" in tell(apart, "validation")
    assert tell(apart, "validation", 0.2) == "m was evaluated on these validation problems, and not trained on them."
    assert "was trained on these problems too" in tell(plain, "validation")
    # There is nothing to say about a run of the default split, of another task, or without a config.
    assert tell(plain, "test") == tell(apart, "test", task=Countdown()) == tell(tmp_path / "none", "test") == ""


def test_graders_are_given_the_keys_that_the_chat_names(monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")
    told = []
    for scoring in (None, ScoringConfig(env=("A_KEY",))):
        with closing(TaskProblems(Faulty(fault="key"), "test", scoring=scoring)) as problems:
            row, messages = problems.take_row()
            exchange = Exchange(messages=tuple(messages), turns=(make_turn("x"),), row=row["id"])
            told.append(problems.describe_outcome(problems.score(exchange, lambda: False).turns[0]))
    assert told == ["WRONG (correct 0, tags 0)", "RIGHT (correct 1, tags 0)"]
