"""Problems with tools or an environment in a chat: turns, calls and replies, the token stream, stops, limits, files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cohort.chat import models as chat_models
from cohort.chat.models import ChatModels
from cohort.chat.options import ChatOptions
from cohort.chat.problems import TaskProblems
from cohort.chat.session import ChatSession
from cohort.engines.scripted import Script, ScriptedEngine
from cohort.errors import ConfigError
from cohort.rollout.episode import EpisodeSettings
from cohort.rollout.producer import Producer
from cohort.rollout.settings import make_conversation_rules, make_conversation_turns
from cohort.scoring.start import start_scorer
from cohort.tasks.calculator import Calculator
from cohort.tasks.stream import TaskStream
from cohort.text import PromptRenderer
from cohort.types import Sampling
from tests.helpers.fake_screen import FakeScreen
from tests.helpers.talking_task import Talking


def call(expression):
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def make_scripted(texts, requests, context=1024):
    """Returns a function in place of `make_sampler`: engines that answer the texts, one after the other."""

    def make_sampler(model, tokenizer, **_):
        answers = iter(texts)

        def script(request):
            requests.append(request)
            return Script(tokens=[*tokenizer.encode(next(answers)), tokenizer.end_of_turn])

        return ScriptedEngine(script, tokenizer.decode, max_context=context, window=3)

    return make_sampler


@pytest.fixture
def make_session(monkeypatch):
    """Returns a function that makes a chat about a task with conversations, with scripted models."""
    opened = []

    def make(texts, task=None, names=("tiny",), **options):
        requests = []
        monkeypatch.setattr(chat_models, "make_sampler", make_scripted(texts, requests))
        options = ChatOptions(threads=1, **options)
        models = ChatModels(options, lambda name: None)
        models.swap(names)
        problems = TaskProblems(task or Calculator(test_size=3), "test")
        session = ChatSession(models, options, FakeScreen(), problems)
        session.requests = requests
        opened.extend([problems, models])
        return session

    yield make
    for thing in opened:
        thing.close()


def test_calls_results_and_verdict_are_shown_turn_by_turn(make_session):
    task = Calculator(test_size=3)
    row = next(iter(task.rows("test")))
    gold = task.gold(row)
    session = make_session([call("2+"), call(row["expression"]), gold, "You are welcome."], task)
    session.handle_line("")
    notes = session.screen.notes
    assert notes[0] == "calculator, problem 1 of 3 (test)" and "tools: calculator" in notes
    shown = session.screen.answers[0]["tiny"]
    lines = shown.split("\n")
    assert lines[0] == call("2+") and lines[1].startswith("[calculator] ValueError")
    assert lines[2] == "(calls: 1 error)" and lines[3] == call(row["expression"])
    assert lines[4] == f"[calculator] {row['answer']}" and lines[5] == gold
    assert any(note.startswith("RIGHT (correct 1") for note in notes) and "right so far: tiny 1 of 1" in notes
    turn = session.conversation.exchanges[0].turns[0]
    assert turn.calls == (("error", 1), ("ok", 1)) and [m["role"] for m in turn.messages] == [
        *("assistant", "tool", "assistant", "tool", "assistant")
    ]
    # A message of the user continues the stream of the episode.
    session.handle_line("Thank you.")
    stream = [*turn.asked, *turn.written]
    assert session.requests[-1].tokens[: len(stream)] == stream
    assert session.requests[-1].continues == "" and len(session.conversation.exchanges) == 2


def test_the_stream_is_that_of_a_rollout(make_session):
    """The chat's tokens equal those that a producer makes of the same turns."""
    task = Calculator(test_size=1)
    texts = [call("1/0"), call("2*3"), "<answer>7</answer>"]
    session = make_session(texts, task)
    session.handle_line("")
    played = session.conversation.exchanges[0].turns[0]

    tokenizer = session.models.members[0].tokenizer
    requests = []
    engine = make_scripted(texts, requests)(None, tokenizer)
    options = ChatOptions()
    sampling = Sampling(max_tokens=1024, stop_ids=tokenizer.stop_ids)
    settings = EpisodeSettings(
        sampling=sampling,
        group_size=1,
        seed=0,
        purpose="eval",
        coefficients={},
        later_turns=make_conversation_turns(options.conversation, sampling, tokenizer),
        context=1024,
    )
    stream = TaskStream(task, PromptRenderer(tokenizer, "chat", ""), 0, "test")
    with start_scorer(task, rules=make_conversation_rules(options.conversation, tokenizer)) as scorer:
        [group] = Producer(engine, scorer, stream, settings).roll_out(stream.render_held_out(1, "test"))
    [sample] = group.samples
    assert list(played.asked) == group.prompt.tokens
    assert list(played.written) == sample.tokens and list(played.provenance) == sample.provenance
    assert played.outcome.parts == sample.parts and list(played.messages) == sample.messages
    assert [r.tokens for r in session.requests] == [r.tokens for r in requests]


def test_models_play_side_by_side_until_the_environment_is_done(make_session):
    session = make_session(["hm"] * 9, Talking(), names=("tiny", "tiny"))
    for _ in range(3):
        session.handle_line("")
    shown = session.screen.answers[2]
    assert set(shown) == {"tiny (1)", "tiny (2)"}
    for text in shown.values():
        assert text.count("[look]") == 3 and text.count("(earned 0.25)") == 2 and text.startswith("hm\n")
    assert session.screen.notes.count("RIGHT (correct 1, earned 0.5 in its turns)") == 2
    keys = {r.key.sample for r in session.requests}
    assert keys == {0, 1}
    session.handle_line("/retry")
    again = [r.key.sample for r in session.requests[-6:]]
    assert set(again) == {2, 3} and session.requests[-6].tokens == session.requests[-12].tokens


def test_a_stop_leaves_no_verdict_and_a_limit_ends_the_episode(make_session):
    session = make_session(["hm"] * 5, Talking(), max_turns=2)
    session.handle_line("/next")
    session.handle_line("/next")
    session.handle_line("/next")
    assert session.screen.answers[2]["tiny"].endswith("[(ended after 2 turns; --max-turns N allows more)]")
    stopped = make_session(["a long answer"] * 3)
    stopped._interrupt.__class__ = type("Flag", (type(stopped._interrupt),), {"is_set": True})
    stopped.handle_line("")
    assert "not scored" in stopped.screen.notes and not stopped.problems.num_scored
    assert stopped.conversation.exchanges[0].turns[0].finish == "abort"


def test_a_context_without_room_is_told(make_session):
    session = make_session(["x"], names=("tiny", "tiny"))
    first, second = session.models.members
    session.models.members = [first, replace(second, context=20)]
    session.handle_line("")
    assert "the context of the model 20, so that there is no room" in session.screen.answers[0]["tiny (2)"]
    assert session.conversation.exchanges[0].turns[1] is None
    session.models.members = [replace(second, context=20)]
    with pytest.raises(ConfigError, match="/next asks the next one"):
        session.handle_line("")


def test_files_have_messages_and_provenance(make_session, tmp_path):
    session = make_session([call("1+1"), "<answer>2</answer>"])
    session.handle_line("")
    session.handle_line(f"/save {tmp_path}/talk.json")
    session.handle_line(f"/save {tmp_path}/talk.md")
    [saved] = json.loads((tmp_path / "talk.json").read_text())["conversations"]
    answer = saved["exchanges"][0]["answers"][0]
    assert [m["role"] for m in answer["messages"]] == ["assistant", "tool", "assistant"]
    assert set(answer["provenance"]) == {1, 2} and len(answer["provenance"]) == len(answer["written"])
    assert answer["calls"] == {"ok": 1}
    text = (tmp_path / "talk.md").read_text()
    assert f"## tiny\n\n{call('1+1')}\n\n## calculator\n\n2\n\n## tiny\n\n<answer>2</answer>\n" in text


def test_another_system_prompt_keeps_the_tools(make_session):
    session = make_session([call("1+1"), "<answer>2</answer>"])
    session.handle_line("")
    before = session.conversation.exchanges[0].turns[0]
    session.handle_line("/system Be brief.")
    after = session.conversation.exchanges[0].turns[0]
    spelled = session.models.members[0].tokenizer.spell(list(after.asked))
    assert "Be brief." in spelled and "calculator" in spelled and after.written == before.written


def test_limits_without_effect_are_refused():
    with pytest.raises(ConfigError, match=r"the task countdown has neither tools .* remove --max-turns, --call-format"):
        ChatOptions(max_turns=3, call_format="tags").check_conversation("countdown", has_conversations=False)
    with pytest.raises(ConfigError, match="a chat without --task"):
        ChatOptions(call_seconds=3).check_conversation("", has_conversations=False)
    with pytest.raises(ConfigError, match="need a chat template"):
        ChatOptions(template="text").check_conversation("calculator", has_conversations=True)
    ChatOptions(max_turns=3).check_conversation("calculator", has_conversations=True)
