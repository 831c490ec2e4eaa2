"""KV that is kept between the turns of a conversation: what is computed, that it is exact, and when memory is freed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from cohort.engines.base import Request, sample
from cohort.engines.native import engine as module
from cohort.engines.native.engine import NativeEngine
from cohort.engines.native.kept import KeptDraft
from cohort.engines.native.kv import Prefix
from cohort.types import Sample
from tests.helpers.decoders_and_groups import small_decoder
from tests.helpers.engine_conformance import (
    PROMPTS,
    SameWeights,
    converse,
    next_turn,
    poll_until_events,
    request,
    spell,
)

REPLIES = [[3, 4, 1], [8], [2, 2, 2, 9, 9], [6, 1]]  # of a conversation of five turns


def make(slots: int = 4, max_context: int = 200, window: int = 8) -> NativeEngine:
    decoder = small_decoder(torch.float64)
    return NativeEngine(decoder, spell, slots=slots, max_context=max_context, window=window)


def ask(prompt: int = 0, index: int = 0, max_tokens: int = 6, **changes) -> Request:
    return request(prompt, index, max_tokens, keep=True, **changes)


def count_gap(one: Sample, other: Sample) -> float:
    """Returns the largest difference between the log-probabilities of two samples with the same tokens."""
    assert one.tokens == other.tokens
    return max(abs(a - b) for a, b in zip(one.sampler_logprobs, other.sampler_logprobs, strict=True))


def is_empty(engine: NativeEngine) -> bool:
    """Returns whether the engine holds no KV at all."""
    return engine.arena.kv.numel() == 0 and not engine.prefixes.pools and not engine.kept


def run_turns(
    engine: NativeEngine, requests: list[Request], replies: list[list[int]], keep: bool = True
) -> dict[str, list[Sample]]:
    """Returns the turns of several conversations that go on together, turn by turn. Nothing is forgotten."""
    requests = [replace(r, keep=keep) for r in requests]
    turns: dict[str, list[Sample]] = {r.id: [] for r in requests}
    for reply in [*replies, []]:
        ended = sample(engine, requests)
        for asked in requests:
            turns[asked.id].append(ended[asked.id])
        # Every conversation gets a reply of its own length.
        requests = [next_turn(r, ended[r.id].tokens, reply + [i] * i, max_tokens=4 + i) for i, r in enumerate(requests)]
    return turns


def test_each_token_of_a_conversation_is_computed_once():
    engine = make()
    turns = converse(engine, ask(), REPLIES)
    # Per later turn, the reply and the last token before it, which no step has computed.
    assert engine.work.num_prompt_tokens == len(PROMPTS[0]) + sum(len(reply) + 1 for reply in REPLIES)
    everything = len(PROMPTS[0]) + sum(len(t.tokens) for t in turns) + sum(map(len, REPLIES))
    # The very last token is drawn and never computed.
    assert engine.work.num_prompt_tokens + engine.work.num_steps == everything - 1


def test_the_prompt_of_a_group_is_computed_once_for_all_turns_of_all_siblings():
    engine = make(slots=8)
    requests = [ask(0, i) for i in range(3)] + [ask(2, i) for i in range(2)]
    run_turns(engine, requests, REPLIES)
    replies = sum(len(reply) + i + 1 for reply in REPLIES for i in range(5))
    assert engine.work.num_prompt_tokens == len(PROMPTS[0]) + len(PROMPTS[2]) + replies


@pytest.mark.parametrize("slots", [1, 2, 16])
@pytest.mark.parametrize("window", [1, 8])
def test_turns_equal_those_that_are_computed_anew(slots: int, window: int):
    """Conversations of different lengths beside each other, in few slots and in many."""
    requests = [ask(p, i, max_tokens=3 + 4 * i + p) for p in range(3) for i in range(3)]
    kept = run_turns(make(slots, window=window), requests, REPLIES)
    engine = make(16)
    anew = run_turns(engine, requests, REPLIES, keep=False)
    assert is_empty(engine)
    for id, turns in kept.items():
        for turn, other in zip(turns, anew[id], strict=True):
            assert count_gap(turn, other) < 1e-10


def run_anew(first: Request, turns: list[Sample], replies: list[list[int]], max_tokens: int = 12) -> list[Sample]:
    """Returns the same turns, each by an engine that has seen nothing before."""
    asked, anew = replace(first, keep=False), []
    for turn, reply in zip(turns, [*replies, []], strict=True):
        anew.append(sample(make(), [replace(asked, continues="")])[asked.id])
        asked = next_turn(asked, turn.tokens, reply, max_tokens)
    return anew


def test_every_turn_equals_that_of_an_engine_without_a_past():
    turns = converse(make(), ask(), REPLIES)
    for turn, other in zip(turns, run_anew(ask(), turns, REPLIES), strict=True):
        assert count_gap(turn, other) < 1e-10


def test_a_reply_that_needs_several_forwards(monkeypatch: pytest.MonkeyPatch):
    """Rows with different numbers of kept tokens and of new ones, in forwards of few tokens and few rows."""
    requests = [ask(0, i, max_tokens=2 + 5 * i) for i in range(5)]
    expected = run_turns(make(slots=8), requests, REPLIES)
    monkeypatch.setattr(module, "EXTEND_TOKENS", 2)
    monkeypatch.setattr(module, "EXTEND_ROWS", 2)
    for id, turns in run_turns(make(slots=8), requests, REPLIES).items():
        for turn, other in zip(turns, expected[id], strict=True):
            assert count_gap(turn, other) < 1e-10


def test_a_conversation_may_begin_while_others_run():
    engine, alone = make(slots=2), make()
    first, long = ask(0, 0, max_tokens=4), ask(1, 0, max_tokens=40)
    engine.submit(long)
    poll_until_events(engine)
    asked, seen, samples = first, [], {}
    for reply in [[3, 4], [5, 6, 7], []]:
        engine.submit(asked)
        while asked.id in engine.drafts:
            samples.update({e.id: e.sample for e in engine.poll() if e.sample})
        seen.append(samples[asked.id])
        asked = next_turn(asked, seen[-1].tokens, reply, max_tokens=4)
    while not engine.idle:
        samples.update({e.id: e.sample for e in engine.poll() if e.sample})
    assert count_gap(samples["1/0"], sample(alone, [long])["1/0"]) < 1e-10
    for turn, other in zip(seen, run_anew(first, seen, [[3, 4], [5, 6, 7]], max_tokens=4), strict=True):
        assert count_gap(turn, other) < 1e-10


def test_a_stop_string_inside_a_window_keeps_what_is_before_it():
    """Steps after the one that completed the string have stored KV of tokens that the sample does not have."""
    plain = sample(make(), [ask(max_tokens=12)])["0/0"].tokens
    stop = f"{plain[2]}.{plain[3]}."
    first = ask(max_tokens=12, stop_strings=(stop,))
    engine = make()
    cut = sample(engine, [first])["0/0"]
    assert len(cut.tokens) < 12
    assert len(engine.kept.by_id["0/0"].tokens) == len(cut.tokens) - 1
    second = next_turn(first, cut.tokens, [3, 4])
    expected = sample(make(), [replace(second, continues="")])["0/0"]
    assert count_gap(sample(engine, [second])["0/0"], expected) < 1e-10


def test_an_answer_that_was_changed_is_computed_from_the_change_on():
    engine = make()
    drawn = sample(engine, [ask(max_tokens=9)])["0/0"].tokens
    other = [*drawn[:5], (drawn[5] + 1) % 60, *drawn[6:]]
    before = engine.work.num_prompt_tokens
    asked = next_turn(ask(max_tokens=9), other, [3, 4])
    one = sample(engine, [asked])["0/0"]
    assert engine.work.num_prompt_tokens - before == 4 + 2
    assert count_gap(one, sample(make(), [replace(asked, continues="")])["0/0"]) < 1e-10


def test_a_load_between_turns_computes_everything_with_the_new_weights():
    engine, changed = make(), make()
    first = ask()
    drawn = sample(engine, [first])["0/0"].tokens
    with torch.no_grad():
        for one in (engine, changed):
            one.decoder.layers[0].qkv.mul_(1.5)
    engine.load(SameWeights(engine.decoder), version=1)
    assert is_empty(engine) and not engine.prefixes.by_tokens
    second = next_turn(first, drawn, [3, 4])
    before = engine.work.num_prompt_tokens
    one = sample(engine, [second])["0/0"]
    assert engine.work.num_prompt_tokens - before == len(second.tokens)
    assert count_gap(one, sample(changed, [replace(second, continues="")])["0/0"]) < 1e-10


def test_a_load_while_a_continued_request_waits_or_runs():
    for polls in (0, 1):
        engine = make(slots=1, window=2)
        first = ask()
        drawn = sample(engine, [first])["0/0"].tokens
        second = next_turn(first, drawn, [3, 4])
        engine.submit(second)
        for _ in range(polls):
            engine.poll()
        engine.load(SameWeights(engine.decoder), version=1)
        assert count_gap(sample(engine, [])["0/0"], sample(make(), [replace(second, continues="")])["0/0"]) < 1e-10


@pytest.mark.parametrize("end", ["forget", "load", "release", "close", "continued", "aborted"])
def test_memory_is_freed_with_the_last_kept_conversation(end: str):
    engine = make()
    first = ask()
    drawn = sample(engine, [first, ask(0, 1)])["0/0"].tokens
    engine.forget("0/1")
    assert engine.idle and engine.kept and not is_empty(engine)
    second = next_turn(first, drawn, [3], keep=False)
    if end == "forget":
        engine.forget("0/0")
    elif end == "load":
        engine.load(SameWeights(engine.decoder), version=1)
    elif end == "continued":
        sample(engine, [second])
    elif end == "aborted":
        engine.submit(second)
        engine.abort("0/0")
    else:
        getattr(engine, end)()
    assert is_empty(engine)
    assert end == "close" or not engine.prefixes.by_tokens


def test_an_aborted_request_is_not_kept():
    engine = make(window=2)
    engine.submit(ask(max_tokens=50))
    engine.poll()
    assert engine.abort("0/0").tokens
    assert is_empty(engine) and not engine.prefixes.by_tokens


def test_kept_kv_is_bounded_by_what_the_slots_can_hold():
    """The earliest ones stay, since they are continued first. The others are computed anew, with the same result."""
    engine = make(slots=1, max_context=34)
    requests = [ask(0, i, max_tokens=7) for i in range(5)]
    ended = sample(engine, requests)
    assert list(engine.kept.by_id) == ["0/0", "0/1", "0/2"]  # 4 tokens of the prompt and 6 drawn ones each
    before = engine.work.num_prompt_tokens
    later = [next_turn(r, ended[r.id].tokens, [3, 4], max_tokens=7) for r in requests]
    again = sample(engine, later)
    assert engine.work.num_prompt_tokens - before == 3 * (2 + 1) + 2 * (7 + 2)
    for asked in later:
        assert count_gap(again[asked.id], sample(make(), [replace(asked, continues="")])[asked.id]) < 1e-10


def test_the_bound_counts_what_waits_to_be_continued():
    engine = make(slots=1, max_context=34, window=1)
    requests = [ask(0, i, max_tokens=7) for i in range(3)]
    ended = sample(engine, requests)
    for asked in requests:
        engine.submit(next_turn(asked, ended[asked.id].tokens, [3], max_tokens=7, keep=False))
    engine.submit(ask(1, 0, max_tokens=7))
    engine.waiting.groups.move_to_end(next(d.prefix for d in engine.waiting if d.request.id == "1/0"), last=False)
    while "1/0" in engine.drafts:
        engine.poll()
    assert not engine.kept


def test_what_two_conversations_have_in_common():
    prefix = Prefix(tokens=(1, 2))

    def cut(tokens: list[int], kept: list[int]) -> list[int] | None:
        made = KeptDraft(prefix=prefix, tokens=list(kept))
        return made.tokens if made.cut_to(tokens) else None

    assert cut([1, 2, 3, 4, 5], [3, 4]) == [3, 4]
    assert cut([1, 2, 3, 4], [3, 4]) == [3]  # the last token is always computed
    assert cut([1, 2, 3], [3, 4]) == []
    assert cut([1, 2, 9, 4, 5], [3, 4]) == []
    assert cut([1, 2, 3, 9, 5], [3, 4]) == [3]
    assert cut([1, 2], [3, 4]) is None
    assert cut([1, 9, 3, 4, 5], [3, 4]) is None
    assert cut([1], [3]) is None


@pytest.mark.parametrize("seed", range(6))
def test_conversations_in_any_order_of_calls(seed: int):
    """Requests begin, continue, are aborted, forgotten, loaded over and released at random. No turn ever differs."""
    rng = random.Random(seed)
    # Little room in some: what is not kept is computed anew.
    engine = make(slots=rng.choice([1, 3]), max_context=rng.choice([60, 200]), window=rng.choice([1, 3]))
    asked: dict[str, Request] = {}  # the newest request of each conversation
    drawn: dict[str, list[int]] = {}  # what it drew, once it has ended
    checked = 0
    for _ in range(60):
        id, action = (
            str(rng.randrange(5)),
            rng.choice(["ask"] * 4 + ["poll"] * 6 + ["abort", "forget", "load", "release"]),
        )
        under_way = id in engine.drafts
        if action == "ask" and not under_way:
            new, length = [rng.randrange(60) for _ in range(rng.randrange(4))], rng.randrange(1, 7)
            if id in drawn and len(asked[id].tokens) < 40:
                cut = drawn.pop(id)[: rng.choice([1, 99])]
                asked[id] = next_turn(asked[id], cut, new, max_tokens=length, keep=rng.random() < 0.9)
            else:
                asked[id] = ask(rng.randrange(3), int(id), max_tokens=length, id=id)
            engine.submit(asked[id])
        elif action == "abort" and under_way:
            drawn[id] = engine.abort(id).tokens
        elif action == "forget":
            engine.forget(id)
        elif action == "load":
            engine.load(SameWeights(engine.decoder), version=engine.version + 1)
        elif action == "release":
            engine.release()
        else:
            for event in engine.poll():
                if event.sample is not None:
                    drawn[event.id] = event.sample.tokens
                    plain = replace(asked[event.id], continues="", keep=False)
                    assert count_gap(event.sample, sample(make(), [plain])[event.id]) < 1e-10
                    checked += 1
    assert checked > 5
    for id in list(engine.drafts):
        engine.abort(id)
    for id in asked:
        engine.forget(id)
    assert is_empty(engine) and not engine.prefixes.by_tokens
