"""The record of a conversation: streams of tokens per model, undo, reset, another system prompt."""

from __future__ import annotations

from cohort.chat.conversation import Conversation, Exchange, ModelTurn
from cohort.types import Finish


def make_turn(asked, written, restarts=False, text="x", forced=""):
    return ModelTurn(
        asked=tuple(asked),
        restarts=restarts,
        written=tuple(written),
        text=text,
        finish=Finish.STOP,
        forced_text=forced,
    )


def ask(words, *turns):
    return Exchange(messages=({"role": "user", "content": words},), turns=turns)


FIRST = ask("a", make_turn([1, 2], [3], True), make_turn([1, 2], [4], True))
SECOND = ask("b", make_turn([5], [6]), None)
THIRD = ask("c", make_turn([7], [8]), make_turn([9], [10]))
TALK = Conversation(system="s").add(FIRST).add(SECOND).add(THIRD)


def test_each_model_has_a_stream_of_its_own():
    assert TALK.get_stream(0) == [1, 2, 3, 5, 6, 7, 8]
    # The second model had no room for the second message, so its stream goes on without it.
    assert TALK.get_stream(1) == [1, 2, 4, 9, 10]
    assert [m["content"] for m in TALK.list_messages(1)] == ["a", "x", "c", "x"]


def test_a_restart_replaces_everything_before():
    talk = TALK.add(ask("d", make_turn([20, 21], [22], True), None))
    assert talk.get_stream(0) == [20, 21, 22]
    assert len(talk.list_messages(0)) == 8


def test_undo_and_reset():
    assert TALK.undo().get_stream(0) == [1, 2, 3, 5, 6]
    emptied = TALK.undo().undo().undo().undo()
    assert emptied.reset() == TALK.reset() == Conversation(system="s")
    assert emptied.exchanges == () and emptied.get_stream(0) == []


def test_what_was_taken_back_is_kept_in_its_place():
    talk = TALK.undo().undo().add(ask("d", make_turn([5], [6]), None))
    told = [(exchange.messages[0]["content"], is_taken_back) for exchange, is_taken_back in talk.list_all()]
    assert told == [("a", False), ("b", True), ("c", True), ("d", False)]
    changed = talk.replace_last(ask("e", None, None))
    assert [exchange.messages[0]["content"] for exchange, _ in changed.list_all()] == ["a", "b", "c", "e"]
    assert len(changed.exchanges) == 2


def test_another_system_prompt_keeps_what_the_models_wrote():
    late = Conversation(exchanges=(ask("a", None), ask("b", make_turn([1], [2], True)), ask("c", make_turn([3], [4]))))
    changed = late.replace_system("new", lambda model, exchange: [100, model, len(exchange.messages)])
    assert changed.system == "new"
    assert changed.get_stream(0) == [100, 0, 1, 2, 3, 4]
    assert Conversation().replace_system("new", lambda model, exchange: []) == Conversation(system="new")


def test_the_forced_beginning_of_an_answer_is_not_repeated():
    prompt = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>"})
    talk = Conversation().add(Exchange(messages=prompt, turns=(make_turn([1], [2], True, "ok", "<think>"),)))
    assert [m["content"] for m in talk.list_messages(0)] == ["q", "<think>ok"]
