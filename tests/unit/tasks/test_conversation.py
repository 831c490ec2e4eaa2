"""Conversations of tasks with tools and environments: what each turn becomes, limits, rewards and mistakes of users."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from cohort.errors import TaskError, UserCodeError
from cohort.tasks.base import TASKS, task
from cohort.tasks.conversation import ConversationEnvironment, ConversationRules, make_opening, open_episode
from cohort.tasks.environment import Episodes, KeyedDraws, Opening, Past, Step
from cohort.types import Answer, Finish, Key, Message, Row

RULES = ConversationRules(max_turns=4, max_calls=3, format="hermes", seconds=5.0, characters=100)
KEY = Key(seed=0, purpose="train", task="sums_with_a_tool", prompt_id="r", visit=0, sample=1)
ROW: Row = {"id": "r", "a": 2, "b": 3}


def read_clock() -> str:
    """Tells the time."""
    return "12:00"


@task("sums_with_a_tool")
class Adder:
    """Sums with a tool, scored by the last message."""

    parts: ClassVar[tuple[str, ...]] = ("correct", "asked")

    def rows(self, split: str) -> list[Row]:
        return [ROW]

    def prompt(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": f"{row['a']}+{row['b']}?"}]

    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        if a > 100:
            raise OverflowError("too large")
        return a + b

    tools = (add, read_clock)

    def score(self, row: Row, answer: Answer) -> dict[str, float]:
        return {"correct": float(answer.text == "5"), "asked": float(answer.calls.count("ok"))}


class Guess:
    """Guess a number that the group shares."""

    def start(self, row: Row, draws: KeyedDraws) -> str:
        self.secret = draws.for_group("secret").between(1, 100)
        self.draws = draws
        self.num = 0
        return "Guess a number from 1 to 100."

    def step(self, answer: Answer) -> Step | str:
        self.num += 1
        if not answer.text.isdigit():
            return "That is no number."
        guess = int(answer.text)
        if guess == self.secret:
            return Step(parts={"correct": 1.0}, earned=0.5)
        word = "Higher" if guess < self.secret else "Lower"
        mark = self.draws.for_turn("mark", self.num).choice(("!", "."))
        return Step(replies=[{"role": "user", "content": word + mark}], done=False, earned=0.25)


@task("guess")
class GuessTask:
    """An environment that brings messages and reward itself."""

    def rows(self, split: str) -> list[Row]:
        return [ROW]

    def environment(self) -> Guess:
        return Guess()


class Counter:
    """The shape of other tools: `reset`, public methods that are tools, and `get_reward`."""

    def reset(self, a: int) -> str:
        self.total = a
        return f" Begin at {a}."

    def increment(self, by: int) -> int:
        """Adds to the total.

        Args:
            by: how much
        """
        self.total += by
        return self.total

    def get_reward(self) -> float:
        return float(self.total == 5)


@task("counter")
class CounterTask:
    def rows(self, split: str) -> list[Row]:
        return [ROW]

    def prompt(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": "Count to 5."}]

    def environment(self) -> Counter:
        return Counter()


def play(made: Any, *texts: str, rules: ConversationRules = RULES, finish: str = "stop") -> list[Step]:
    """Starts an episode and steps it with these messages. Returns the steps."""
    environment = ConversationEnvironment(made, rules)
    opening = environment.start(ROW, KeyedDraws(KEY))
    talk = list(opening.messages)
    steps = []
    for text in texts:
        talk = [*talk, {"role": "assistant", "content": text}]
        answer = Answer(text=text, full=text, finish=finish, num_tokens=3, conversation=talk)
        steps.append(environment.step(answer))
        talk = [*talk, *steps[-1].replies]
    return steps


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


ADD = call("add", '{"a": 2, "b": 3}')


def test_a_call_is_answered_and_the_last_message_is_scored() -> None:
    first, last = play(Adder(), ADD, "5")
    assert first == Step(done=False, replies=[{"role": "tool", "name": "add", "content": "5"}], calls={"ok": 1})
    assert (last.done, last.parts, last.ending) == (True, {"correct": 1.0, "asked": 1.0}, "")


def test_several_calls_of_a_message_are_answered_in_order() -> None:
    (step,) = play(Adder(), f"{call('clock')} {ADD} {call('add', '{}')}")
    assert [reply["content"] for reply in step.replies] == [
        'There is no tool "clock". Tools: add, read_clock.',
        "5",
        'Malformed call: the argument "a" is missing.',
    ]
    assert step.calls == {"unknown": 1, "ok": 1, "malformed": 1}


def test_what_a_tool_raises_is_shown_to_the_model() -> None:
    step, last = play(Adder(), call("add", '{"a": 200, "b": 1}'), "5")
    assert step.replies[0]["content"] == "OverflowError: too large" and step.calls == {"error": 1}
    assert last.parts == {"correct": 1.0, "asked": 0.0}


def test_limits_end_a_conversation_with_their_name() -> None:
    *_, last = play(Adder(), *[call("read_clock")] * 2, rules=replace(RULES, max_turns=2))
    assert (last.done, last.ending, last.calls) == (True, "turns", {"ok": 1})
    assert last.parts == {"correct": 0.0, "asked": 2.0}
    *_, last = play(Adder(), call("read_clock") * 2, call("read_clock") * 2)
    assert (last.done, last.ending) == (True, "calls")
    # An answer that was cut off is not followed by anything, even if it has a call.
    (last,) = play(Adder(), ADD, finish="length")
    assert last.done and last.parts == {"correct": 0.0, "asked": 0.0}


def test_text_of_a_tool_is_never_read_as_a_call() -> None:
    class Fake(Adder):
        def add(self, a: int, b: int) -> str:  # type: ignore[override]
            """Adds."""
            return call("read_clock")

        tools = ("add",)

    step, last = play(Fake(), ADD, "5")
    assert step.calls == {"ok": 1} and step.replies[0]["content"] == call("read_clock")
    assert last.done and last.calls == {}


def test_an_environment_replies_earns_and_ends() -> None:
    opened = open_episode(GuessTask(), ROW, KeyedDraws(KEY))
    secret = opened.environment.secret
    assert opened.messages == [{"role": "user", "content": "Guess a number from 1 to 100."}] and not opened.tools
    words, low, last = play(GuessTask(), "none", str(secret - 1), str(secret))
    assert words.replies == [{"role": "user", "content": "That is no number."}] and not words.done
    assert low.replies[0]["content"].startswith("Higher") and low.earned == 0.25
    assert (last.done, last.parts, last.earned) == (True, {"correct": 1.0}, 0.5)


def test_an_environment_that_is_not_done_at_the_limit_has_given_no_reward() -> None:
    *_, last = play(GuessTask(), *["0"] * 4)
    assert (last.done, last.ending, last.parts, last.earned) == (True, "turns", {"correct": 0.0}, 0.25)
    assert last.reason == "the conversation ended before a reward"


def test_an_object_with_reset_has_its_methods_as_tools() -> None:
    opened = open_episode(CounterTask(), ROW, KeyedDraws(KEY))
    assert opened.messages == [{"role": "user", "content": "Count to 5. Begin at 2."}]
    assert list(opened.tools) == ["increment"]
    assert opened.tools["increment"].parameters["properties"]["by"] == {"type": "integer", "description": "how much"}
    step, last = play(CounterTask(), call("increment", '{"by": 3}'), "done")
    assert step.replies[0]["content"] == "5"
    assert last.parts == {"correct": 1.0}
    (last,) = play(CounterTask(), "done")
    assert last.parts == {"correct": 0.0}


def test_the_samples_of_a_group_begin_alike_and_draw_their_own_numbers() -> None:
    secrets = {
        open_episode(GuessTask(), ROW, KeyedDraws(replace(KEY, sample=n))).environment.secret for n in range(-1, 5)
    }
    assert len(secrets) == 1
    later = [open_episode(GuessTask(), ROW, KeyedDraws(replace(KEY, visit=n))).environment.secret for n in range(20)]
    assert len(set(later)) > 5
    own = [KeyedDraws(replace(KEY, sample=n)).for_turn("mark", 1).below(1 << 30) for n in range(5)]
    assert len(set(own)) == 5
    with pytest.raises(TaskError, match=r"use draws.for_group"):
        KeyedDraws(replace(KEY, sample=-1)).for_turn("mark", 1)


def test_an_episode_is_replayed_in_another_worker_and_closed_there() -> None:
    def make() -> ConversationEnvironment:
        return ConversationEnvironment(GuessTask(), RULES)

    talk = [{"role": "user", "content": "Guess a number from 1 to 100."}]
    answers = [Answer(text="0", full="0", finish="stop", num_tokens=1, conversation=talk) for _ in range(3)]
    here, there = Episodes(make), Episodes(make)
    steps = [here.step(ROW, Past(key=KEY, answers=tuple(answers[:n])), answers[n]) for n in range(3)]
    assert there.step(ROW, Past(key=KEY, answers=tuple(answers[:2])), answers[2]) == steps[2]
    for table in (here, Episodes(make)):
        closed = table.close(
            ROW, Past(key=KEY, answers=tuple(answers[:2])), answers[2], Finish.TOTAL, lambda answer: None
        )
        assert (closed.done, closed.ending, closed.parts) == (True, "total", {"correct": 0.0})
    assert not len(here)


class Odd:
    """An environment whose methods return what a test wants."""

    opening: Any = "Go."
    stepped: Any = None

    def start(self, row: Row, draws: KeyedDraws) -> Any:
        if isinstance(self.opening, Exception):
            raise self.opening
        return self.opening

    def step(self, answer: Answer) -> Any:
        return self.stepped


@pytest.mark.parametrize(
    ("opening", "error", "message"),
    [
        ([], TaskError, "must return a list of one or more dicts"),
        (None, TaskError, "must return a list of one or more dicts"),
        ([{"content": "x"}], TaskError, "must return a list of one or more dicts"),
        ([{"role": "user", "content": {1}}], TaskError, "cannot be written as JSON"),
        (KeyError("q"), UserCodeError, "the method start of the environment"),
    ],
)
def test_an_opening_that_is_none_is_refused(
    opening: Any, error: type[Exception], message: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Odd, "opening", opening)
    monkeypatch.setattr(GuessTask, "environment", lambda self: Odd())
    with pytest.raises(error, match=message):
        open_episode(GuessTask(), ROW, KeyedDraws(KEY))


@pytest.mark.parametrize(
    ("stepped", "message"),
    [
        (None, "return cohort.Step"),
        ({"correct": 1.0}, "return cohort.Step"),
        (Step(done=False), "not done and has no `replies`"),
        (Step(replies=[{"role": "user", "content": "x"}]), "is done and has `replies`; write done=False"),
        (Step(), "has no `parts`, and the task has no method `score`"),
    ],
)
def test_a_step_that_is_none_is_refused(stepped: Any, message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(Odd, "stepped", stepped)
    monkeypatch.setattr(GuessTask, "environment", lambda self: Odd())
    with pytest.raises(TaskError, match=message):
        play(GuessTask(), "x")


def test_an_opening_may_be_an_opening_or_messages(monkeypatch: Any) -> None:
    monkeypatch.setattr(GuessTask, "environment", lambda self: Odd())
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for opening in (messages, Opening(messages=messages)):
        monkeypatch.setattr(Odd, "opening", opening)
        assert open_episode(GuessTask(), ROW, KeyedDraws(KEY)).messages == messages


def test_an_environment_that_begins_differently_each_time_is_refused(monkeypatch: Any) -> None:
    numbers = iter(range(9))
    monkeypatch.setattr(Guess, "start", lambda self, row, draws: f"Guess {next(numbers)}.")
    environment = ConversationEnvironment(GuessTask(), RULES)
    environment.start(ROW, KeyedDraws(KEY))
    shown = [{"role": "user", "content": "Guess 7."}]
    with pytest.raises(TaskError, match="begins differently each time"):
        environment.step(Answer(text="1", full="1", finish="stop", num_tokens=1, conversation=shown))


@pytest.mark.parametrize("returned", [None, 3, object()])
def test_a_task_whose_environment_is_none_is_refused(returned: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(GuessTask, "environment", lambda self: returned)
    with pytest.raises(TaskError, match=r"return a new object with the methods start\(row, draws\) and step\(answer\)"):
        open_episode(GuessTask(), ROW, KeyedDraws(KEY))


def test_a_task_with_an_environment_needs_rows_alone() -> None:
    with pytest.raises(TaskError, match="has no method rows"):

        @task("rowless")
        class Rowless:
            def environment(self) -> Guess:
                return Guess()

    with pytest.raises(TaskError, match="has no method prompt"):

        @task("promptless")
        class Promptless:
            tools = (read_clock,)

            def rows(self, split: str) -> list[Row]:
                return []

    assert "rowless" not in TASKS and "promptless" not in TASKS


def test_one_reward_of_reset_may_be_parts(monkeypatch: Any) -> None:
    for given, parts in ((1, {"correct": 1.0}), ({"correct": 0.0}, {"correct": 0.0})):
        monkeypatch.setattr(Counter, "get_reward", lambda self, given=given: given)
        (last,) = play(CounterTask(), "x")
        assert last.parts == parts
    monkeypatch.setattr(CounterTask, "parts", ("correct", "reward"))
    monkeypatch.setattr(Counter, "get_reward", lambda self: 1.5)
    (last,) = play(CounterTask(), "x")
    assert last.parts == {"correct": 1.0, "reward": 1.5}
    monkeypatch.setattr(Counter, "get_reward", lambda self: "good")
    with pytest.raises(TaskError, match="return a number or a dict"):
        play(CounterTask(), "x")


def test_prompts_of_every_kind_of_task_can_be_written() -> None:
    adder, guess, counter = (make_opening(made, ROW) for made in (Adder(), GuessTask(), CounterTask()))
    assert adder.messages == [{"role": "user", "content": "2+3?"}]
    assert [tool["function"]["name"] for tool in adder.tools] == ["add", "read_clock"]
    assert guess == Opening(messages=[{"role": "user", "content": "Guess a number from 1 to 100."}])
    assert counter.messages[0]["content"] == "Count to 5. Begin at 2."


def test_a_reward_so_far_counts_at_the_limit_of_turns(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        Odd, "stepped", Step(parts={"correct": 1.0}, cost=0.25, replies=[{"role": "user", "content": "."}], done=False)
    )
    monkeypatch.setattr(GuessTask, "environment", lambda self: Odd())
    *_, last = play(GuessTask(), "a", "b", rules=replace(RULES, max_turns=2))
    assert (last.done, last.parts, last.cost, last.ending, last.replies) == (True, {"correct": 1.0}, 0.25, "turns", [])


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("add", "write a tuple of functions"),
        ({"add": 1}, "write a tuple of functions"),
        (read_clock, "write a tuple of functions"),
        (("nothing",), 'has no method "nothing", which its tools name'),
    ],
)
def test_tools_in_another_form_are_refused(tools: Any, message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(Adder, "tools", staticmethod(tools) if callable(tools) else tools)
    with pytest.raises(TaskError, match=message):
        open_episode(Adder(), ROW, KeyedDraws(KEY))


def test_an_object_of_two_shapes_and_one_without_a_reward_are_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(Counter, "start", Guess.start, raising=False)
    monkeypatch.setattr(Counter, "step", Guess.step, raising=False)
    with pytest.raises(TaskError, match="has `reset` as well as `start` and `step`"):
        open_episode(CounterTask(), ROW, KeyedDraws(KEY))
    monkeypatch.undo()
    monkeypatch.delattr(Counter, "get_reward")
    with pytest.raises(TaskError, match="has no reward"):
        open_episode(CounterTask(), ROW, KeyedDraws(KEY))
