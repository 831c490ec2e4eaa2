"""The GPU engine: protocol, exactness, validity of graphs, memory."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.gpu.device import DEVICE, HAS_GPU, only_gpu

# isort: split

from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.engines.base import Request, sample
from cohort.engines.native.cuda import step
from cohort.engines.native.cuda.engine import GraphEngine
from cohort.engines.native.cuda.pages import count_page_bytes
from cohort.engines.native.engine import NativeEngine
from cohort.errors import ConfigError, ModelError
from cohort.learner.local import LocalLearner
from cohort.loops.learning import annotate
from cohort.models.decoder import Decoder
from cohort.types import Finish, Sample
from tests.helpers.decoders_and_groups import make_group, make_sample, small_decoder
from tests.helpers.engine_conformance import PROMPTS, EngineConformance, SameWeights, request, spell

WHOLE = {"num_layers": 2, "num_heads": 6, "num_kv_heads": 2}
FAMILIES = [WHOLE, {"qk_norm": True}, {"qkv_bias": True}, {"out_bias": True, "mlp_bias": True, "tied": False}]
# Triton's interpreter takes milliseconds per program. So without a GPU most tests have a smaller model, fewer rows in a
# step and keys in one part.
SIZE = WHOLE if HAS_GPU else {"num_layers": 1, "num_heads": 3, "num_kv_heads": 1}
SLOTS = 4 if HAS_GPU else 2


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    if not HAS_GPU:
        monkeypatch.setattr(step, "MIN_PROGRAMS", 1)


def decoder(dtype: torch.dtype = torch.float32, **changes) -> Decoder:
    """Returns a small decoder on the test device, with random biases."""
    made = small_decoder(head_dim=32, **{**SIZE, **changes})
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "bias" in name:
                p.normal_(generator=torch.Generator().manual_seed(1))
    return made.to(dtype).to(DEVICE)


def make(model: Decoder | None = None, slots: int = SLOTS, window: int = 4, **changes) -> GraphEngine:
    return GraphEngine(model or decoder(), spell, slots=slots, max_context=200, window=window, **changes)


class TestConformance(EngineConformance):
    def make(self, slots: int = SLOTS) -> GraphEngine:
        return make(slots=slots)


class TestConformanceWindowOne(EngineConformance):
    """With window 1, as for a server: every token is reported at once."""

    def make(self, slots: int = SLOTS) -> GraphEngine:
        return make(slots=slots, window=1)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_samples_are_those_of_the_plain_engine(family):
    """Same keys, same tokens: more requests than slots, unequal lengths, shared prompts and lone ones."""
    model = decoder(**family)
    requests = [request(p, i, max_tokens=5 + (9 if HAS_GPU else 4) * i + p) for p in range(3) for i in range(3)]
    expected = sample(NativeEngine(model, spell, slots=4, max_context=200), requests)
    samples = sample(make(model, slots=5), requests)
    for id, one in expected.items():
        assert samples[id].tokens == one.tokens
        gaps = (torch.tensor(samples[id].sampler_logprobs) - torch.tensor(one.sampler_logprobs)).abs()
        assert gaps.max() < 2e-5
        assert (samples[id].finish, samples[id].text) == (one.finish, one.text)


@pytest.mark.parametrize(
    "wish", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}, {"temperature": 0.6}, {"temperature": 0.0}]
)
def test_every_way_of_drawing(wish):
    model = decoder()
    requests = [request(p, i, **(wish if i else {})) for p in range(2) for i in range(3)]  # one of three without
    expected = sample(NativeEngine(model, spell, slots=8, max_context=200), requests)
    samples = sample(make(model, slots=8), requests)
    for id, one in expected.items():
        assert samples[id].tokens == one.tokens
        torch.testing.assert_close(samples[id].kept_mass, one.kept_mass, atol=1e-5, rtol=1e-5)


def test_own_tokens_behind_a_shared_prefix():
    """A conversation that is continued: `shared` tokens are stored once, the others per request."""
    model = decoder()
    long = [(7 * i) % 61 for i in range(90)]
    requests = [request(0, i, tokens=[*long, *PROMPTS[i], *long[: 40 * i]], shared=90, start=3) for i in range(3)]
    expected = sample(NativeEngine(model, spell, slots=4, max_context=200), requests)
    engine = make(model, slots=4)
    samples = sample(engine, requests)
    assert {id: s.tokens for id, s in samples.items()} == {id: s.tokens for id, s in expected.items()}
    own = sum(len(r.tokens) - 90 - 1 for r in requests)
    assert engine.work.num_prompt_tokens == 90 + own


def test_keys_in_parts_or_whole_give_the_same_samples(monkeypatch):
    """Few rows split their keys over more programs: prompts of three pages and of one, read in one part and in many."""
    model = decoder(**WHOLE)
    long = [(7 * i) % 61 for i in range(150)]
    requests = [request(p, i, max_tokens=4, **({} if p else {"tokens": long})) for p in range(2) for i in range(2)]
    got = []
    for programs in (1, 528):
        monkeypatch.setattr(step, "MIN_PROGRAMS", programs)
        got.append(sample(make(model, slots=4), requests))
    for id, one in got[0].items():
        assert got[1][id].tokens == one.tokens
        gaps = (torch.tensor(got[1][id].sampler_logprobs) - torch.tensor(one.sampler_logprobs)).abs()
        assert gaps.max() < 2e-5


def test_an_optimizer_step_is_seen_without_a_copy_and_graphs_stay_valid():
    model = decoder()
    engine = make(model)
    before = sample(engine, [request()])["0/0"].tokens
    assert engine.graphs is not None
    captured, address = engine.graphs.num_captures, model.layers[0].qkv.data_ptr()
    learner = LocalLearner(model, LearnerConfig(token_budget=256), OptimConfig(lr=0.3), num_updates=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    learner.optimizer.step(0.3, 1.0)
    engine.load(learner.weights(), version=1)
    after = sample(engine, [request()])["0/0"].tokens
    fresh = sample(NativeEngine(model, spell, slots=4, max_context=200), [request()])["0/0"].tokens
    assert after == fresh != before
    assert (engine.graphs.num_captures, model.layers[0].qkv.data_ptr()) == (captured, address)


def test_moved_weights_are_noticed(caplog):
    model = decoder()
    engine = make(model)
    sample(engine, [request()])
    with torch.no_grad():
        moved = model.layers[-1].down
        moved.data = (moved.data * -1.5).clone()
    with caplog.at_level(logging.WARNING):
        after = sample(engine, [request()])["0/0"].tokens
    assert "moved" in caplog.text
    assert after == sample(make(model), [request()])["0/0"].tokens


def test_a_small_arena_streams_what_does_not_fit_at_once():
    model = decoder()
    budget = 4 * count_page_bytes(model.config, torch.float32)  # page 0, and room for one prompt and two samples
    requests = [request(p, i, max_tokens=9) for p in range(3) for i in range(3)]
    engine = make(model, slots=2 * SLOTS, memory=budget)
    samples = sample(engine, requests)
    expected = sample(make(model, slots=2 * SLOTS), requests)
    assert {id: s.tokens for id, s in samples.items()} == {id: s.tokens for id, s in expected.items()}
    assert engine.arena is not None and engine.arena.num_pages == 4
    assert len(engine.arena.free_pages) == 3  # all given back


def test_a_request_that_cannot_fit_is_refused_with_the_numbers():
    model = decoder()
    engine = make(model, memory=3 * count_page_bytes(model.config, torch.float32))
    with pytest.raises(ConfigError, match=r"need 4 pages .* room for 3 "):
        engine.submit(request(max_tokens=120))
    assert engine.poll() == []


def test_memory_is_kept_or_released(caplog):
    model = decoder()
    page = count_page_bytes(model.config, torch.float32)
    kept, released = (make(model, memory=64 * page, reserve=others * page) for others in (50, 62))
    for engine in (kept, released):
        with caplog.at_level(logging.INFO):
            sample(engine, [request()])
    assert kept.arena is not None and released.arena is None
    assert "kept between rollouts" in caplog.text and "released between rollouts" in caplog.text
    assert sample(released, [request()])["0/0"].tokens == sample(kept, [request()])["0/0"].tokens


def test_rows_without_a_draft_stand_still():
    """After a load fewer drafts continue: empty rows must not write to pages that belong to other drafts now."""
    model = decoder()
    engine = make(model, slots=6, window=2)
    expected = sample(make(model, slots=6), [request(0, i, max_tokens=40) for i in range(2)])
    for i in range(6):
        engine.submit(request(0, i, max_tokens=40))
    engine.poll()
    engine.load(SameWeights(model), version=1)
    for i in range(2, 6):
        engine.abort(f"0/{i}")
    ended = collect(engine)
    assert {id: s.tokens for id, s in ended.items()} == {id: s.tokens for id, s in expected.items()}


def collect(engine: GraphEngine) -> dict[str, Sample]:
    """Polls until nothing is reported any more and returns the finished samples by id."""
    ended = {}
    while events := engine.poll():
        ended |= {e.id: e.sample for e in events if e.sample}
    return ended


def test_a_prompt_that_was_evicted_is_computed_again():
    """Its siblings have ended, and its pages are freed for others just before its last sample enters."""
    model = decoder()
    requests = [request(1, 0, max_tokens=60), request(0, 0, max_tokens=4), request(0, 1, max_tokens=130)]
    engine = make(model, slots=4, window=2, memory=6 * count_page_bytes(model.config, torch.float32))
    expected = sample(NativeEngine(model, spell, slots=4, max_context=200), requests)
    assert {id: s.tokens for id, s in sample(engine, requests).items()} == {id: s.tokens for id, s in expected.items()}


def test_more_prompts_than_entries_of_the_table():
    def one(prompt: int, index: int, length: int = 6) -> Request:
        return request(0, 0, max_tokens=length, id=f"{prompt}/{index}", tokens=[prompt + 1, 2, 3])

    engine = make(slots=2, window=1)
    for p in (50, 51):  # an earlier, longer load has made the arena large
        engine.submit(one(p, 0, 150))
    engine.poll()
    for p in (50, 51):
        engine.abort(f"{p}/0")
    for p in range(6):
        engine.submit(one(p, 0))
    asked, ended = set(), set()
    while events := engine.poll():
        ended |= {e.id for e in events if e.sample}
        for p in {int(e.id.split("/")[0]) for e in events} - asked & {0, 2, 3}:
            asked.add(p)
            engine.submit(one(p, 1))
    assert len(ended) == 6 + len(asked)
    assert engine.arena is not None and len(engine.arena.free_pages) == engine.arena.num_pages - 1
    assert len(engine.state.tables.free_entries) == len(engine.state.tables.prefix_length)


def test_nothing_is_lost_when_a_prefill_fails(monkeypatch):
    model = decoder()
    engine = make(model)
    requests = [request(p, 0) for p in range(2)]
    for r in requests:
        engine.submit(r)
    with monkeypatch.context() as patch:
        patch.setattr("cohort.engines.native.cuda.engine.prefill", lambda *_: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            engine.poll()
    assert engine.arena is not None and len(engine.arena.free_pages) == engine.arena.num_pages - 1
    assert {id: s.tokens for id, s in collect(engine).items()} == {
        id: s.tokens for id, s in sample(make(model), requests).items()
    }


def test_a_damaged_window_does_not_keep_good_weights_out():
    """The weights are damaged while two windows are under way. The load of good weights keeps the good tokens."""
    model = decoder()
    engine = make(model, window=2)
    expected = sample(make(model), [request(max_tokens=20)])["0/0"].tokens
    engine.submit(request(max_tokens=20))
    engine.poll()
    held = model.layers[0].qkv.detach().clone()
    with torch.no_grad():
        model.layers[0].qkv[3] = float("nan")
    engine._launch_window(engine._count_steps())
    with torch.no_grad():
        model.layers[0].qkv.copy_(held)
    engine.load(SameWeights(model), version=2)
    assert engine.version == 2
    assert collect(engine)["0/0"].tokens == expected


def test_a_damaged_row_leaves_no_hole_in_the_others():
    """A row is damaged in a window, and the next window has drawn more for the rows that are read after it."""
    model = decoder(tied=False)
    good = request(0, 1, max_tokens=12)
    expected = sample(make(model), [good])["0/1"].tokens
    with torch.no_grad():
        model.embed[60] = float("nan")  # read only by requests that have this token
    engine = make(model, window=2)
    engine.submit(request(1, 0, max_tokens=2, tokens=[7, 60, 1]))
    engine.submit(good)
    with pytest.raises(ModelError, match="not finite"):
        engine.poll()
    engine.abort("1/0")
    assert 60 not in expected
    assert collect(engine)["0/1"].tokens == expected


def test_abort_of_a_request_that_ended_inside_a_load():
    model = decoder()
    engine = make(model, window=2)
    engine.submit(request(0, 0, max_tokens=4))
    engine.submit(request(0, 1, max_tokens=30))
    engine.poll()
    engine.load(SameWeights(model), version=1)
    first, second = engine.abort("0/0"), engine.abort("0/1")
    assert {first.finish, second.finish} == {Finish.ABORT}
    assert first.tokens == sample(make(model), [request(0, 0, max_tokens=4)])["0/0"].tokens
    assert engine.poll() == []  # no event for aborted requests


def test_a_larger_load_grows_the_arena_between_rollouts(caplog):
    engine = make(slots=2 * SLOTS)
    siblings, length = (3, 100) if HAS_GPU else (1, 70)  # more than a page in both
    sample(engine, [request()])
    assert engine.arena is not None
    before = engine.arena.num_pages
    with caplog.at_level(logging.INFO):
        samples = sample(engine, [request(p, i, max_tokens=length) for p in range(3) for i in range(siblings)])
    assert engine.arena.num_pages > before and "again" in caplog.text
    assert all(len(s.tokens) == length for s in samples.values())


def test_damaged_weights_raise_and_have_no_effect_after_a_load():
    model = decoder()
    engine = make(model)
    good = sample(engine, [request()])["0/0"].tokens
    held = model.layers[0].qkv.detach().clone()
    with torch.no_grad():
        model.layers[0].qkv[3] = float("nan")
    engine.submit(request())
    with pytest.raises(ModelError, match="not finite"):
        while engine.poll():
            pass
    with torch.no_grad():
        model.layers[0].qkv.copy_(held)
    engine.load(SameWeights(model), version=2)
    ended = {}
    while events := engine.poll():
        ended |= {e.id: e.sample for e in events if e.sample}
    assert ended["0/0"].tokens == good
    assert ended["0/0"].finish is Finish.LENGTH


def test_a_load_under_way_continues_exactly():
    """The KV of drawn tokens is computed again with the new weights, as for a continued sample."""
    model = decoder()
    engine = make(model, window=2)
    engine.submit(request(max_tokens=40))
    engine.poll()
    engine.load(SameWeights(model), version=1)
    ended = {}
    while events := engine.poll():
        ended |= {e.id: e.sample for e in events if e.sample}
    assert ended["0/0"].tokens == sample(make(model), [request(max_tokens=40)])["0/0"].tokens
    assert [v for _, v in ended["0/0"].versions] == [0, 1]


def gap(model: Decoder, prompts: int = 3, siblings: int = 4, length: int = 100) -> tuple[float, float]:
    """Mean and largest difference between the sampler's and the learner's log-probabilities."""
    requests = [request(p, i, max_tokens=length) for p in range(prompts) for i in range(siblings)]
    samples = sample(make(model, slots=8), requests)
    learner = LocalLearner(model, LearnerConfig(token_budget=4096), OptimConfig(), num_updates=1)
    groups = [
        make_group(PROMPTS[p], [make_sample(samples[f"{p}/{i}"].tokens) for i in range(siblings)])
        for p in range(prompts)
    ]
    annotate(learner, groups, ["old"])
    difference = []
    for p, group in enumerate(groups):
        for i, one in enumerate(group.samples):
            drawn = torch.tensor(samples[f"{p}/{i}"].sampler_logprobs)
            difference.append((drawn - torch.tensor(one.old_logprobs)).abs())
    every = torch.cat(difference)
    return float(every.mean()), float(every.max())


def test_fp32_logprobs_are_the_learners():
    mean, most = gap(decoder()) if HAS_GPU else gap(decoder(), siblings=2, length=20)
    assert mean <= 1e-5 and most <= 2e-4


@only_gpu
def test_bf16_logprobs_are_close_to_the_learners():
    mean, _ = gap(decoder(torch.bfloat16, std=0.1))
    assert mean < 0.01


@only_gpu
def test_splinters_of_blocks_in_use_are_no_room():
    """Memory that torch holds but cannot hand out in one piece does not count as free for KV."""
    torch.cuda.empty_cache()
    engine = make()
    tight = 2 * 2**30
    beyond = torch.empty(torch.cuda.mem_get_info()[0] - tight, dtype=torch.uint8, device=DEVICE)
    blocks = [torch.empty(8 * 2**20, dtype=torch.uint8, device=DEVICE) for _ in range(160)]  # two per segment of 20 MiB
    before = engine._measure_room(10).kv_bytes
    del blocks[::2]
    splinters = engine._measure_room(10).kv_bytes - before
    del blocks
    assert splinters < 2**26 and engine._measure_room(10).kv_bytes > before + 2**29
    del beyond


@only_gpu
def test_graphs_are_captured_once_per_variant():
    model = decoder()
    engine = make(model, slots=64)
    requests = [request(p, i, max_tokens=3 + i) for p in range(3) for i in range(16)]
    sample(engine, requests)
    assert engine.graphs is not None
    captured = engine.graphs.num_captures
    assert 1 <= captured <= 8
    sample(engine, requests)
    assert engine.graphs.num_captures == captured


@only_gpu
def test_the_plain_path_works_on_a_gpu_too():
    model = decoder()
    requests = [request(p, i) for p in range(3) for i in range(3)]
    plain = sample(NativeEngine(model, spell, slots=4, max_context=200), requests)
    assert {id: s.tokens for id, s in plain.items()} == {
        id: s.tokens for id, s in sample(make(model), requests).items()
    }
