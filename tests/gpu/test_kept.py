"""The GPU engine and the KV that it keeps between the turns of a conversation: counts, exactness, pages, memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.gpu.device import HAS_GPU

# isort: split

from cohort.engines.base import Request, sample
from cohort.engines.native.cuda import prefill as prefill_module
from cohort.engines.native.cuda import step
from cohort.engines.native.cuda.engine import GraphEngine
from cohort.engines.native.cuda.ledger import PageLedger, count_own_pages
from cohort.engines.native.cuda.pages import PageArena, PageTables, count_page_bytes
from cohort.engines.native.cuda.rotate import PAGE
from cohort.engines.native.draft import NativeDraft
from cohort.engines.native.engine import NativeEngine
from cohort.errors import ConfigError
from cohort.models.decoder import Decoder
from cohort.types import Sample
from tests.gpu.test_engine import collect, decoder, make
from tests.helpers.engine_conformance import PROMPTS, SameWeights, converse, next_turn, request, spell

REPLIES = [[3, 4, 1], [8], [2, 2, 2, 9, 9], [6, 1]]  # of a conversation of five turns
LONG = [(7 * i) % 61 for i in range(90)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        monkeypatch.setattr(step, "MIN_PROGRAMS", 1)


def ask(prompt: int = 0, index: int = 0, max_tokens: int = 3, **changes) -> Request:
    return request(prompt, index, max_tokens, keep=True, **changes)


def has_freed_everything(engine: GraphEngine) -> bool:
    """Returns whether no page, no entry of the table and no prefix is in use."""
    pages = engine.arena is None or len(engine.arena.free_pages) == engine.arena.num_pages - 1
    entries = len(engine.state.tables.free_entries) == len(engine.state.tables.prefix_length)
    return pages and entries and not engine.ledger.prefixes and not engine.ledger.kept and not engine.ledger.idle_kept


def check_same(model: Decoder, asked: Request, one: Sample) -> None:
    """Checks that a turn equals that of the plain engine, which has seen no earlier turn."""
    plain = NativeEngine(model, spell, slots=2, max_context=200)
    other = sample(plain, [replace(asked, continues="", keep=False)])[asked.id]
    assert one.tokens == other.tokens
    gaps = (torch.tensor(one.sampler_logprobs) - torch.tensor(other.sampler_logprobs)).abs()
    assert gaps.max() < 2e-5


def test_each_token_of_a_conversation_is_computed_once():
    engine = make(window=3)
    turns = converse(engine, ask(), REPLIES, sampling=ask().sampling)
    assert [len(t.tokens) for t in turns] == [3] * 5
    # The last token of the prompt and of a reply is left to the first step, which also draws.
    assert engine.work.num_prompt_tokens == len(PROMPTS[0]) - 1 + sum(map(len, REPLIES))
    assert engine.work.num_prompt_tokens + engine.work.num_steps == len(PROMPTS[0]) + sum(map(len, REPLIES)) + 5 * 3 - 1
    assert has_freed_everything(engine)


@pytest.mark.parametrize("prompt", [PROMPTS[1], LONG[:1], LONG[: PAGE + 1], LONG[:PAGE]], ids=len)
def test_turns_are_those_of_the_plain_engine(prompt: list[int]):
    """Siblings with answers and replies of different lengths, also across the end of a page."""
    model = decoder()
    engine = make(model, slots=3)
    requests = [ask(1, i, max_tokens=2 + 3 * i, tokens=prompt) for i in range(3)]
    new = 0
    for reply in ([3, 4], LONG[:50], [5]):
        before = engine.work.num_prompt_tokens
        ended = sample(engine, requests)
        assert engine.work.num_prompt_tokens - before == (new or len(prompt) - 1)
        for asked in requests:
            check_same(model, asked, ended[asked.id])
        requests = [next_turn(r, ended[r.id].tokens, reply + [i] * i, max_tokens=3 + i) for i, r in enumerate(requests)]
        new = sum(len(reply) + i for i in range(3))
    for asked in requests:
        engine.forget(asked.id)
    assert has_freed_everything(engine)


def test_conversations_go_on_while_others_run():
    model = decoder()
    engine = make(model, slots=2, window=2)
    long = request(1, 0, max_tokens=24)
    engine.submit(long)
    asked = ask()
    engine.submit(asked)
    turns: list[tuple[Request, Sample]] = []
    ended: dict[str, Sample] = {}
    while not engine.idle:
        for event in engine.poll():
            if event.sample is not None and event.id == "0/0":
                turns.append((asked, event.sample))
                if len(turns) < 4:
                    asked = next_turn(asked, event.sample.tokens, [3, 4], max_tokens=3, keep=len(turns) < 3)
                    engine.submit(asked)
            elif event.sample is not None:
                ended[event.id] = event.sample
    assert engine.work.num_prompt_tokens == len(PROMPTS[0]) - 1 + len(PROMPTS[1]) - 1 + 3 * 2
    assert len(turns) == 4 and has_freed_everything(engine)
    for one in [*turns, (long, ended["1/0"])]:
        check_same(model, *one)


def test_steps_behind_a_stop_string_do_not_reach_what_is_kept():
    """The device knows no stop strings: windows under way go on writing to the row's last page."""
    model = decoder()
    plain = sample(make(model), [ask(max_tokens=12)])["0/0"].tokens
    first = ask(max_tokens=12, stop_strings=(f"{plain[2]}.{plain[3]}.",))
    engine = make(model, window=2)
    cut = sample(engine, [first])["0/0"]
    assert len(cut.tokens) < 12
    second = next_turn(first, cut.tokens, [3, 4], max_tokens=4)
    check_same(model, second, sample(engine, [second])["0/0"])


def test_an_answer_that_was_changed_is_computed_from_the_change_on():
    model = decoder()
    engine = make(model)
    drawn = sample(engine, [ask(max_tokens=9)])["0/0"].tokens
    before = engine.work.num_prompt_tokens
    second = next_turn(ask(), [*drawn[:5], (drawn[5] + 1) % 60, *drawn[6:]], [3, 4], max_tokens=4)
    one = sample(engine, [second])["0/0"]
    assert engine.work.num_prompt_tokens - before == 4 + 2 - 1
    check_same(model, second, one)


def test_a_shorter_request_gives_pages_back():
    engine = make(slots=2, window=1)
    first = ask(tokens=LONG, max_tokens=3)
    drawn = sample(engine, [first])["0/0"].tokens
    sample(engine, [next_turn(first, drawn, LONG, max_tokens=2)])
    assert len(engine.ledger.kept["0/0"].pages) == 2
    sample(engine, [request(tokens=LONG, max_tokens=2, continues="0/0")])
    assert has_freed_everything(engine)


def make_small(pages: int) -> GraphEngine:
    """Returns an engine with memory for so many pages, of which page 0 is never used."""
    model = decoder()
    return make(model, slots=4, memory=pages * count_page_bytes(model.config, torch.float32))


def test_kept_kv_makes_room_for_others_and_is_computed_again():
    """The prompts of both conversations are dropped first, and then the newer conversation: that is enough."""
    engine = make_small(7)
    first = [ask(p, 0, max_tokens=3) for p in range(2)]
    large = request(2, 0, max_tokens=65, tokens=LONG + LONG[:40])  # three pages of the prompt, two of its own
    engine.submit(first[0])
    engine.submit(first[1])
    engine.submit(large)
    ended: dict[str, Sample] = {}
    while len(ended) < 2:
        ended |= {e.id: e.sample for e in engine.poll() if e.sample is not None}
    assert engine.arena is not None and engine.arena.num_pages == 7
    assert len(engine.abort("2/0").tokens) < 65
    sample(engine, [replace(large, sampling=replace(large.sampling, stop_ids=tuple(range(64))))])
    assert not engine.ledger.kept["1/0"].tokens and engine.ledger.kept["0/0"].tokens
    for asked, computed in zip(first, (2 + 3, 3 + 3 + 2 - 1), strict=True):
        before = engine.work.num_prompt_tokens
        second = next_turn(asked, ended[asked.id].tokens, [3, 4], max_tokens=3, keep=False)
        check_same(engine.decoder, second, sample(engine, [second])[asked.id])
        assert engine.work.num_prompt_tokens - before == computed
    assert has_freed_everything(engine)


def test_nothing_is_dropped_for_a_request_that_has_no_room_even_then():
    engine = make_small(7)
    runs = request(1, 0, max_tokens=140)  # a page of the prompt, three of its own
    engine.submit(ask(max_tokens=3))
    engine.submit(runs)
    while "0/0" not in engine.ledger.kept:
        engine.poll()
    engine.submit(request(2, 0, max_tokens=65, tokens=LONG + LONG[:40]))
    engine.poll()
    assert len(engine.drafts) == 2 and engine.ledger.kept["0/0"].tokens


@pytest.mark.parametrize(("pages", "anew"), [(7, False), (6, True)])
def test_a_larger_arena_takes_over_what_is_kept_if_both_have_room(pages: int, anew: bool):
    engine = make_small(pages)
    first = ask(max_tokens=3)
    drawn = sample(engine, [first])["0/0"].tokens
    assert engine.arena is not None and engine.arena.num_pages == 3
    before = engine.work.num_prompt_tokens
    second = next_turn(first, drawn, LONG[:70], max_tokens=3, keep=False)
    check_same(engine.decoder, second, sample(engine, [second])["0/0"])
    assert engine.arena.num_pages == 4
    assert engine.work.num_prompt_tokens - before == (len(second.tokens) - 1 if anew else 70)
    assert has_freed_everything(engine)


def test_a_refused_request_leaves_what_it_would_have_continued():
    engine = make_small(4)
    first = ask(max_tokens=3)
    drawn = sample(engine, [first])["0/0"].tokens
    with pytest.raises(ConfigError, match="need 6 pages"):
        engine.submit(next_turn(first, drawn, LONG, max_tokens=100))
    before = engine.work.num_prompt_tokens
    second = next_turn(first, drawn, [3, 4], max_tokens=3)
    check_same(engine.decoder, second, sample(engine, [second])["0/0"])
    assert engine.work.num_prompt_tokens - before == 2


@pytest.mark.parametrize("end", ["forget", "load", "release", "close", "continued", "aborted"])
def test_memory_is_released_with_the_last_kept_conversation(end: str):
    model = decoder()
    page = count_page_bytes(model.config, torch.float32)
    engine = make(model, memory=64 * page, reserve=62 * page)
    first = ask()
    drawn = sample(engine, [first])["0/0"].tokens
    engine.poll()
    assert engine.idle and engine.arena is not None and not engine.keep_arena
    second = next_turn(first, drawn, [3], max_tokens=2)
    if end == "forget":
        engine.forget("0/0")
    elif end == "load":
        engine.load(SameWeights(model), version=1)
    elif end == "continued":
        sample(engine, [replace(second, keep=False)])
    elif end == "aborted":
        engine.submit(second)
        engine.abort("0/0")
    else:
        getattr(engine, end)()
    assert engine.arena is None and not engine.ledger.kept
    assert end == "close" or has_freed_everything(engine)


def test_a_load_between_turns_and_one_while_a_turn_waits():
    model = decoder()
    for submit_before in (False, True):
        engine = make(model)
        first = ask()
        second = next_turn(first, sample(engine, [first])["0/0"].tokens, [3, 4], max_tokens=4, keep=False)
        if submit_before:
            engine.submit(second)
        engine.load(SameWeights(model), version=1)
        before = engine.work.num_prompt_tokens
        one = (collect(engine) if submit_before else sample(engine, [second]))["0/0"]
        assert engine.work.num_prompt_tokens - before == len(second.tokens) - 1
        check_same(model, second, one)
        assert has_freed_everything(engine)


def test_a_prefill_that_fails_loses_only_what_was_kept(monkeypatch: pytest.MonkeyPatch):
    model = decoder()
    engine = make(model)
    first = ask()
    second = next_turn(first, sample(engine, [first])["0/0"].tokens, [3, 4], max_tokens=4, keep=False)
    engine.submit(second)
    with monkeypatch.context() as patch:
        patch.setattr("cohort.engines.native.cuda.engine.prefill", lambda *_: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            engine.poll()
    check_same(model, second, collect(engine)["0/0"])
    assert has_freed_everything(engine)


def test_forwards_are_bounded_by_the_stored_tokens_too(monkeypatch: pytest.MonkeyPatch):
    """Short replies after long conversations: few of them share a forward, since each reads all its tokens before."""
    model = decoder()
    sizes: list[int] = []
    compute = prefill_module._compute_runs
    monkeypatch.setattr(prefill_module, "_compute_runs", lambda *args: (sizes.append(len(args[3])), compute(*args))[1])
    engine = make(model, slots=4)
    engine.prefill_tokens = 50  # 200 stored tokens
    requests = [ask(0, i, max_tokens=2, tokens=LONG) for i in range(4)]
    ended = sample(engine, requests)
    sizes.clear()
    engine.prefill_tokens = 50
    later = [next_turn(r, ended[r.id].tokens, [3, 4], max_tokens=2, keep=False) for r in requests]
    again = sample(engine, later)
    assert sizes == [2, 2]  # 92 tokens before each
    for asked in later:
        check_same(model, asked, again[asked.id])


@pytest.mark.parametrize("seed", range(8))
def test_every_page_has_one_owner(seed: int):
    """Drafts enter, end, are kept, continued, aborted and forgotten at random, in an arena that is always too small."""
    rng = random.Random(seed)
    tables = PageTables(4, 12, torch.device("cpu"))
    ledger = PageLedger(tables)
    ledger.arena = PageArena(decoder().config, 14, torch.float32, torch.device("cpu"))
    waiting: list[NativeDraft] = []
    ended: dict[str, NativeDraft] = {}
    num_continued = num_dropped = 0
    for number in range(800):
        running = [draft for draft, _ in ledger.running.values()]
        action = rng.choice(["submit", "enter", "enter", "end", "end", "abort", "forget", "all"] + ["continue"] * 3)
        if action == "submit":
            waiting.append(submit(ledger, ask(rng.randrange(3), max_tokens=rng.randrange(1, 150), id=str(number))))
        elif action == "continue" and ended:
            id, before = ended.popitem()
            if len(before.all_tokens) > 400:  # it would never fit
                continue
            had = bool(ledger.kept[id].tokens) if id in ledger.kept else False
            reply = [1] * rng.randrange(1, 90)
            asked = next_turn(before.request, before.tokens, reply, max_tokens=5, continues=id, id=str(number))
            waiting.append(submit(ledger, asked))
            assert bool(waiting[-1].num_kept) == had
        elif action == "enter" and waiting and ledger.reserve(waiting[place := rng.choice([0, -1])]):
            draft = waiting.pop(place)
            assert len(ledger.get_pages(draft)) == count_own_pages(draft)
            num_continued += draft.num_kept > 0
            num_dropped += draft.kept is not None and not draft.num_kept
            draft.kept = None
            ledger.uncomputed.clear()
        elif action == "end" and running:
            draft = rng.choice(running)
            draft.tokens = [2] * rng.randrange(1, draft.request.sampling.max_tokens + 1)
            ledger.keep_draft(draft)
            ended[draft.request.id] = draft
        elif action == "abort" and waiting + running:
            draft = rng.choice(waiting + running)
            waiting = [other for other in waiting if other is not draft]
            ledger.remove_draft(draft)
        elif action == "forget" and ended:
            ledger.remove_kept(rng.choice(list(ended)))
        elif action == "all" and rng.random() < 0.2:
            waiting += running
            ledger.free_all()
        check_pages(ledger)
    assert num_continued > 5 and num_dropped > 0
    for draft in [*waiting, *(draft for draft, _ in ledger.running.values())]:
        ledger.remove_draft(draft)
    for id in list(ledger.kept):
        ledger.remove_kept(id)
    check_pages(ledger)
    assert len(ledger.arena.free_pages) == 13 and not ledger.prefixes
    assert len(tables.free_entries) == len(tables.prefix_length)


def submit(ledger: PageLedger, asked: Request) -> NativeDraft:
    """Returns the draft of a request, as the engine makes it."""
    kept = ledger.take_kept(asked)
    shared = min(asked.shared if asked.shared > 0 else len(asked.tokens), len(asked.tokens) - 1)
    prefix = ledger.add_user(tuple(asked.tokens[:shared])) if kept is None else kept.prefix
    return NativeDraft(request=asked, prefix=prefix, own_prompt=asked.tokens[len(prefix.tokens) :], kept=kept)


def check_pages(ledger: PageLedger) -> None:
    """Checks that every page but page 0 is free or has exactly one owner."""
    assert ledger.arena is not None
    owners = [ledger.arena.free_pages]
    owners += [pages for _, pages in ledger.running.values()]
    owners += [kept.pages for kept in ledger.idle_kept] + [prefix.pages for prefix in ledger.prefixes.values()]
    assert sorted(page for pages in owners for page in pages) == list(range(1, ledger.arena.num_pages))
