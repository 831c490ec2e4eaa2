"""A chat from line to line, with scripted engines: history, limits, errors, commands, problems of a task."""

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
from cohort.errors import ConfigError, EngineError, ModelError
from cohort.tasks.countdown import Countdown
from tests.helpers.fake_screen import FakeScreen


@pytest.fixture
def make_session(monkeypatch):
    """Returns a function that makes a session whose models answer the given texts, one after the other."""
    sessions = []

    def make(texts, lines=(), names=("tiny",), context=None, problems=None, **options):
        requests = []

        def make_sampler(model, tokenizer, **_):
            answers = iter(texts)

            def script(request):
                requests.append(request)
                text = next(answers)
                if isinstance(text, Exception):
                    raise text
                return Script(tokens=[*tokenizer.encode(text), tokenizer.end_of_turn])

            return ScriptedEngine(script, tokenizer.decode, max_context=context or model.config.context, window=3)

        monkeypatch.setattr(chat_models, "make_sampler", make_sampler)
        models = ChatModels(ChatOptions(threads=1, **options), lambda name: None)
        models.swap(names)
        if context:
            models.members = [replace(member, context=context) for member in models.members]
        session = ChatSession(models, ChatOptions(threads=1, **options), FakeScreen(lines), problems)
        session.requests = requests
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        session.models.close()


def test_the_history_is_the_stream_of_tokens(make_session):
    session = make_session(["four", "nine"], ["2+2?", "and 5?"], system="Add.")
    session.run()
    assert [list(a.values()) for a in session.screen.answers] == [["four"], ["nine"]]
    first, second = (r.tokens for r in session.requests)
    written = session.conversation.exchanges[0].turns[0].written
    assert second[: len(first) + len(written)] == [*first, *written]
    spelled = session.models.members[0].tokenizer.spell(second)
    assert spelled == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
        "<|im_start|>user\nand 5?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_model_that_is_named_twice_draws_other_numbers(make_session):
    session = make_session(["a", "a"], names=("tiny", "tiny"))
    assert session.labels == ["tiny (1)", "tiny (2)"]
    assert session.models.members[0].engine is not session.models.members[1].engine
    session.handle_line("hello")
    one, two = (r.key for r in session.requests)
    assert one != two and replace(two, sample=0) == one
    session.handle_line("/retry")
    assert session.requests[2].key == replace(one, visit=1) and session.requests[2].tokens == session.requests[0].tokens


def test_a_full_context_is_told_with_the_numbers(make_session):
    session = make_session(["x" * 100] * 9, context=130)
    session.handle_line("Hello, how are you today?")
    # What is left of the context is the limit of the answer, and of the next one nothing is left.
    num = len(session.requests[0].tokens)
    assert session.requests[0].sampling.max_tokens == 130 - num
    with pytest.raises(
        ConfigError, match=r"the conversation has \d+ tokens .* and the context of the model 130\. /undo"
    ):
        session.handle_line("Tell me more, please." * 3)
    assert len(session.conversation.exchanges) == 1
    session.handle_line("/reset")
    session.handle_line("Again")
    assert len(session.requests) == 2


def test_one_model_may_be_full_while_the_other_answers(make_session):
    session = make_session(["yes"] * 9, names=("tiny", "tiny"))
    first, second = session.models.members
    session.models.members = [first, replace(second, context=10)]
    session.handle_line("A question that is longer than ten tokens")
    shown = session.screen.answers[0]
    assert shown["tiny (1)"] == "yes" and "context of the model 10" in shown["tiny (2)"]
    assert session.conversation.exchanges[0].turns[1] is None
    session.models.members = [first, second]
    session.handle_line("more")
    assert session.models.members[1].tokenizer.spell(session.requests[-1].tokens).count("user") == 1


def test_an_engine_that_fails_changes_nothing(make_session):
    session = make_session(["one", EngineError("the engine died: start again."), "two"], ["a", "b", "c"])
    session.run()
    assert "the engine died: start again." in session.screen.notes
    assert len(session.conversation.exchanges) == 2
    failing = make_session([EngineError("it died.")], ["a"])
    failing.screen.is_interactive = False
    with pytest.raises(EngineError):
        failing.run()


def test_a_template_without_follow_ups_renders_the_conversation_again(make_session, monkeypatch):
    session = make_session(["one", "two"])
    session.handle_line("a")

    def refuse(self, words, written):
        raise ModelError("the template drops earlier turns")

    monkeypatch.setattr(chat_models.ChatModel, "encode_follow_up", refuse)
    session.handle_line("b")
    spelled = session.models.members[0].tokenizer.spell(session.requests[1].tokens)
    assert spelled.endswith("assistant\none<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")
    assert session.conversation.exchanges[1].turns[0].restarts
    assert session.conversation.get_stream(0)[: len(session.requests[1].tokens)] == session.requests[1].tokens


def test_base_models_continue_plain_text(make_session):
    session = make_session(["one", "two"], template="text")
    session.handle_line("a")
    session.handle_line("b")
    spelled = session.models.members[0].tokenizer.spell(session.requests[1].tokens)
    assert spelled == "a\n\none\n\nb\n\n"


def test_ctrl_c_and_bad_input_do_not_end_the_chat(make_session):
    session = make_session(
        ["one"], [KeyboardInterrupt(), ConfigError("this line is not text."), "half \ud800 char", ""]
    )
    session.run()
    assert (
        "Ctrl-D or /quit leaves the chat." in session.screen.notes and "this line is not text." in session.screen.notes
    )
    assert [m["content"] for m in session.conversation.exchanges[0].messages] == ["half ? char"]


def test_three_interrupts_in_one_answer_end_the_program(make_session):
    session = make_session(["one"], [KeyboardInterrupt(), "never read"])
    session._interrupt.count = 3
    with pytest.raises(KeyboardInterrupt):
        session.run()


def test_an_interrupt_keeps_the_partial_answer(make_session):
    session = make_session(["a long answer", "next"])
    session._interrupt.__class__ = type("Flag", (type(session._interrupt),), {"is_set": True})
    session.handle_line("go")
    turn = session.conversation.exchanges[0].turns[0]
    assert turn.finish == "abort" and "a long answer".startswith(turn.text) and turn.text != "a long answer"
    assert session.screen.answers[0]["tiny"] == f"{turn.text}[(stopped)]"
    session.handle_line("next")
    spelled = session.models.members[0].tokenizer.spell(session.requests[1].tokens)
    assert f"assistant\n{turn.text}<|im_end|>\n<|im_start|>user\nnext" in spelled


def test_models_are_swapped_or_stay(make_session, tmp_path):
    session = make_session(["one", "two", "three"])
    session.handle_line("hello")
    with pytest.raises(ModelError):
        session.handle_line("/model missing-model")
    with pytest.raises(ConfigError, match="cannot be read"):
        session.handle_line("/model 'open")
    assert len(session.conversation.exchanges) == 1 and session.labels == ["tiny"]
    session.handle_line("again")
    session.handle_line("/model tiny tiny")
    assert session.labels == ["tiny (1)", "tiny (2)"] and not session.conversation.exchanges
    with pytest.raises(ModelError, match=r"no config\.json"):
        session.handle_line(f"/model tiny {tmp_path}")
    session.handle_line("still here")


def test_problems_are_scored_and_counted(make_session):
    problems = TaskProblems(Countdown(test_size=3), "test")
    row = problems._rows[0]
    gold = Countdown().gold(row)
    session = make_session([gold, "<answer>1</answer>", "fine"], problems=problems)
    try:
        session.handle_line("")
        session.handle_line("/retry")
        session.handle_line("Why?")
    finally:
        problems.close()
    assert "countdown, problem 1 of 3 (test)" in session.screen.notes
    right, wrong = (note for note in session.screen.notes if note.startswith(("RIGHT", "WRONG")))
    assert right.startswith("RIGHT (correct 1") and wrong.startswith("WRONG (correct 0")
    # Only the first attempt counts, and follow-ups are not scored.
    assert session.screen.notes.count("right so far: tiny 1 of 1") == 2
    assert [exchange.row for exchange in session.conversation.exchanges] == [row["id"], ""]


def test_saved_files_have_everything(make_session, tmp_path):
    session = make_session(["\x1b[2Jone"], system="Be brief.")
    session.handle_line("hello")
    session.handle_line(f"/save {tmp_path}/talk.json")
    [saved] = json.loads((tmp_path / "talk.json").read_text())["conversations"]
    answer = saved["exchanges"][0]["answers"][0]
    assert answer["text"] == "\x1b[2Jone" and answer["written"] == list(
        session.conversation.exchanges[0].turns[0].written
    )
    assert saved["settings"]["system"] == "Be brief." and saved["models"][0]["name"] == "tiny"
    session.handle_line(f"/save {tmp_path}/talk.md")
    text = (tmp_path / "talk.md").read_text()
    (tmp_path / "mine.json").write_text("{}")
    assert "## User\n\nhello\n" in text and "## tiny\n\n\\x1b[2Jone\n" in text and "\x1b" not in text
    for line, message in (
        ("/save", "the file is missing"),
        (f"/save {tmp_path}/mine.json", "exists already"),
        (f"/save {tmp_path}/no/talk.md", "there is no folder"),
        (f"/save {tmp_path}", "is a folder; name a file in it"),
        ("/save missing/", "missing is a folder; name a file in it, such as missing/chat.md"),
        (f"/save {tmp_path}/{'x' * 300}.md", "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=message):
            session.handle_line(line)


def test_the_whole_session_is_saved(make_session, tmp_path):
    problems = TaskProblems(Countdown(test_size=3), "test")
    gold = Countdown().gold(problems._rows[0])
    texts = [gold, "<answer>1</answer>", "why not", "third", "again", "a swapped model"]
    session = make_session(texts, ["", "", "Why?", "/reset", "Hello.", "/retry"], problems=problems)
    file = tmp_path / "talk.md"
    try:
        session.screen.lines += [f"/save {tmp_path}/talk", "/model tiny tiny", "Bye."]
        session.run()
    finally:
        problems.close()
    # A name without an extension is that of Markdown, and what is said after /save is in the file too at the end.
    assert f"wrote {file}, with 5 exchanges since the start" in session.screen.notes
    assert session.screen.notes[-1] == f"wrote {file}, with 6 exchanges since the start"
    text = file.read_text()
    assert [line for line in text.splitlines() if line.startswith("# ")] == [
        "# Conversation 1 of 4: tiny",
        "# Conversation 2 of 4: tiny",
        "# Conversation 3 of 4: tiny",
        "# Conversation 4 of 4: tiny, tiny",
    ]
    parts = text.split("# Conversation ")[1:]
    assert gold in parts[0] and "Verdict: correct 1" in parts[0] and "right so far: tiny 1 of 1" in parts[0]
    assert "right so far: tiny 1 of 2" in parts[1] and "## User\n\nWhy?\n\n## tiny\n\nwhy not" in parts[1]
    assert "## User (taken back)\n\nHello.\n\n## tiny (taken back)\n\nthird" in parts[2]
    assert "## User\n\nHello.\n\n## tiny\n\nagain" in parts[2] and "Bye." in parts[3]


def test_files_are_brought_up_to_date_also_after_an_error(make_session, tmp_path):
    file = tmp_path / "talk.json"
    lines = ["a", f"/save {file}", "b", "/undo", "/nonsense"]
    session = make_session(["one", "two"], [f"/save {file}", *lines])
    session.screen.is_interactive = False
    with pytest.raises(ConfigError, match="nothing to save yet"):
        session.run()
    session.screen.lines = lines
    with pytest.raises(ConfigError, match="unknown command"):
        session.run()
    [saved] = json.loads(file.read_text())["conversations"]
    assert [exchange["taken_back"] for exchange in saved["exchanges"]] == [False, True]


def test_models_are_named_once(make_session):
    session = make_session([], names=("tiny", "tiny"))
    session.show_models()
    assert [note.partition(": ")[0] for note in session.screen.notes] == ["tiny (1)", "tiny (2)"]
    member = session.models.members[0]
    for name, label, told in (
        ("runs/grid/002@3", "002@3", "runs/grid/002@3"),
        ("a/x", "x (1)", "x (1) = a/x"),
        ("tiny", "tiny", "tiny"),
    ):
        assert replace(member, name=name, label=label).full_label == told
