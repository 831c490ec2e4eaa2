"""The native engine: protocol, memory, scheduling. tests/equivalence/test_engine.py tests that it is exact."""

from __future__ import annotations

import pytest
import torch

from cohort.engines.base import sample
from cohort.engines.native.engine import NativeEngine
from cohort.errors import ConfigError, ModelError
from cohort.models.decoder import hf_views, to_hf_shape
from cohort.types import Finish
from tests.helpers.decoders_and_groups import GivenWeights, small_decoder
from tests.helpers.engine_conformance import EngineConformance, SameWeights, request, spell


def make(slots: int = 4, dtype: torch.dtype = torch.float32, window: int = 8, **changes) -> NativeEngine:
    return NativeEngine(small_decoder(dtype, **changes), spell, slots=slots, max_context=200, window=window)


def hf_tensors(decoder) -> dict[str, torch.Tensor]:
    """Returns copies of all weights by Hugging Face name."""
    return {name: to_hf_shape(name, view).clone() for name, view in hf_views(decoder)}


class TestConformance(EngineConformance):
    def make(self, slots: int = 4) -> NativeEngine:
        return make(slots)


class TestConformanceWindowOne(EngineConformance):
    """With window 1, as for a server: every token is reported at once."""

    def make(self, slots: int = 4) -> NativeEngine:
        return make(slots, window=1)


def test_prompt_is_stored_and_computed_once_per_group():
    engine = make(slots=8)
    for p, size in ((0, 5), (2, 3)):
        for i in range(size):
            engine.submit(request(p, i, max_tokens=30))
    engine.poll()
    stored = [p.tokens for pool in engine.prefixes.pools.values() for p in pool.prefixes]
    assert sorted(map(len, stored)) == [4, 12]
    assert engine.work.num_prompt_tokens == 4 + 12
    assert {p.num_users for p in engine.prefixes.by_tokens.values()} == {5, 3}


def test_prefix_is_freed_with_its_last_sibling():
    engine = make(slots=8)
    for i, n in enumerate((3, 20, 40)):
        engine.submit(request(0, i, max_tokens=n))
    engine.submit(request(1, 0, max_tokens=60))
    seen = []
    while engine.poll():
        seen.append(sorted((len(p.tokens), p.num_users) for p in engine.prefixes.by_tokens.values()))
    assert seen[0] == [(3, 1), (4, 2)]  # after 9 tokens
    assert [(3, 1)] in seen  # the group of prompt 0 is gone while the other runs
    assert seen[-1] == []
    assert all(not pool.prefixes for pool in engine.prefixes.pools.values())


def test_a_waiting_sibling_keeps_the_prompt():
    engine = make(slots=1)
    engine.submit(request(0, 0, max_tokens=3))
    engine.submit(request(0, 1, max_tokens=3))
    sample(engine, [])
    assert engine.work.num_prompt_tokens == 4


def test_a_group_is_finished_before_the_next_begins():
    engine = make(slots=2)
    for i in range(4):  # submitted in turns
        for p in range(3):
            engine.submit(request(p, i, max_tokens=4))
    most = 0
    while engine.poll():
        most = max(most, sum(len(pool.prefixes) for pool in engine.prefixes.pools.values()))
    assert most <= 2


def test_slots_bound_the_running_requests():
    engine = make(slots=3)
    for i in range(10):
        engine.submit(request(0, i, max_tokens=10))
    most = 0
    while engine.poll():
        most = max(most, len(engine.running))
    assert most == 3 and engine.work.num_drawn == 100


def test_refill_does_not_wait_for_the_slowest():
    """30 requests of unequal length in 4 slots: nearly as few steps as work / slots."""
    engine = make(slots=4)
    lengths = [3 + 11 * i % 17 for i in range(30)]
    sample(engine, [request(0, i, max_tokens=n) for i, n in enumerate(lengths)])
    # The first token of a request needs no step. At the end the last few requests run alone.
    assert engine.work.num_steps <= (sum(lengths) - 30) / 4 + max(lengths)


def test_kept_mass_only_when_truncating():
    samples = sample(make(), [request(0, 0, top_p=0.5), request(0, 1), request(0, 2, top_k=1)])
    assert samples["0/1"].kept_mass == []
    for id in ("0/0", "0/2"):
        s = samples[id]
        assert len(s.kept_mass) == len(s.tokens) and all(0 < m <= 1 for m in s.kept_mass)
    assert all(m >= 0.5 - 1e-6 for m in samples["0/0"].kept_mass)
    # top-k 1 takes the most probable token: its mass is its probability
    s = samples["0/2"]
    assert [torch.tensor(p).exp().item() for p in s.sampler_logprobs] == pytest.approx(s.kept_mass, abs=1e-6)
    assert s.tokens == sample(make(), [request(0, 0, temperature=0.0)])["0/0"].tokens


def test_first_tokens_of_siblings_differ():
    samples = sample(make(slots=64), [request(0, i, max_tokens=1) for i in range(64)])
    assert len({s.tokens[0] for s in samples.values()}) > 10


def test_optimizer_step_is_seen_without_a_copy():
    engine = make(dtype=torch.float64)
    before = sample(engine, [request()])["0/0"]
    with torch.no_grad():
        engine.decoder.embed.mul_(-1)
    engine.load(SameWeights(engine.decoder), version=1)
    after = sample(engine, [request()])["0/0"]
    fresh = NativeEngine(engine.decoder, spell, slots=4, max_context=200)
    assert after.tokens == sample(fresh, [request()])["0/0"].tokens != before.tokens
    assert after.versions == [(0, 1)]


def test_foreign_weights_are_copied_by_name():
    engine, other = make(qkv_bias=True, tied=False), make(seed=1, qkv_bias=True, tied=False)
    pointer = engine.decoder.layers[0].qkv.data_ptr()
    engine.load(GivenWeights(list(hf_tensors(other.decoder).items())), version=7)
    for (name, mine), (_, theirs) in zip(hf_views(engine.decoder), hf_views(other.decoder), strict=True):
        assert torch.equal(mine, theirs), name
    assert engine.decoder.layers[0].qkv.data_ptr() == pointer
    assert sample(engine, [request()])["0/0"].tokens == sample(other, [request()])["0/0"].tokens


def test_tied_head_in_foreign_weights_is_no_error():
    engine, other = make(), make(seed=1)
    tensors = hf_tensors(other.decoder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    engine.load(GivenWeights(list(tensors.items())), version=1)
    assert torch.equal(engine.decoder.embed, other.decoder.embed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lack 1 tensors.*model.norm.weight"),
        (lambda t: t.update({"model.norm.wight": torch.ones(32)}), "model.norm.wight.*Did you mean"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), "model.norm.weight.*31"),
        (
            lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.ones(40, 32)}),
            r"down_proj.*\[40, 32\].*\[32, 40\]",
        ),
    ],
)
def test_foreign_weights_that_do_not_fit_are_refused(change, message: str):
    engine = make()
    tensors = hf_tensors(engine.decoder)
    change(tensors)
    with pytest.raises(ModelError, match=message):
        engine.load(GivenWeights(list(tensors.items())), version=1)


def test_sampling_leaves_the_shared_parameters_trainable():
    engine = make()
    sample(engine, [request()])
    hidden = engine.decoder(torch.tensor([1, 2]), torch.arange(2), lambda layer, q, k, v: q)
    hidden.sum().backward()
    assert engine.decoder.layers[0].qkv.grad is not None


def test_damaged_weights_are_an_error_and_leave_no_trace():
    engine = make()
    good = {name: p.detach().clone() for name, p in engine.decoder.named_parameters()}
    expected = sample(make(), [request()])["0/0"].tokens
    engine.submit(request())
    with torch.no_grad():
        engine.decoder.layers[1].down.fill_(float("nan"))
    # However often it is polled, the engine draws nothing more from these weights.
    for _ in range(3 * engine.window):
        with pytest.raises(ModelError, match=r"version 0.*not finite"):
            engine.poll()
    assert engine.slots.num_filled.max() <= engine.window + 1
    with torch.no_grad():
        for name, p in engine.decoder.named_parameters():
            p.copy_(good[name])
    engine.load(SameWeights(engine.decoder), version=1)
    assert sample(engine, [])["0/0"].tokens == expected


def test_release_frees_memory_and_sampling_continues():
    engine = make()
    expected = sample(make(), [request(max_tokens=40)])["0/0"].tokens
    engine.submit(request(max_tokens=40))
    engine.poll()
    engine.release()
    assert engine.arena.kv.numel() == 0 and not engine.prefixes.pools
    s = sample(engine, [])["0/0"]
    assert s.tokens == expected and s.versions == [(0, 0)]


def test_context_is_exactly_usable():
    engine = make()
    s = sample(engine, [request(max_tokens=196)])["0/0"]  # 4 + 196 = 200
    assert len(s.tokens) == 196 and s.finish == Finish.LENGTH
    with pytest.raises(ConfigError, match=r"4 prompt tokens.*197 = 201.*200"):
        engine.submit(request(max_tokens=197))


def test_impossible_settings_are_refused():
    decoder = small_decoder()
    with pytest.raises(ConfigError, match=r"slots = 0"):
        NativeEngine(decoder, spell, slots=0, max_context=100)
    with pytest.raises(ConfigError, match=r"513 tokens.*512"):
        NativeEngine(decoder, spell, slots=1, max_context=513)


def test_stop_string_across_a_reported_window():
    """Its first half is the last token of one window, its second the first of the next."""
    plain = sample(make(), [request(max_tokens=30)])["0/0"].tokens
    stop = f".{plain[8]}.{plain[9]}."  # a window reports 9 tokens first, the draw at entry and 8 steps
    s = sample(make(), [request(max_tokens=30, stop_strings=(stop,))])["0/0"]
    end = next(n for n in range(1, 31) if stop in spell(plain[:n]))
    assert s.tokens == plain[:end] and s.finish == Finish.STOP
    assert s.text == spell(plain)[: spell(plain).index(stop)]


def test_kept_mass_ends_with_the_tokens_at_a_stop_string():
    plain = sample(make(), [request(max_tokens=30, top_p=0.9)])["0/0"]
    stop = f".{plain.tokens[4]}."
    s = sample(make(), [request(max_tokens=30, top_p=0.9, stop_strings=(stop,))])["0/0"]
    end = next(n for n in range(1, 31) if stop in spell(plain.tokens[:n]))
    assert s.kept_mass == plain.kept_mass[:end] and s.sampler_logprobs == plain.sampler_logprobs[:end]


def test_abort_of_a_waiting_request_may_move_a_prompt_that_is_in_use():
    """Prompt 1 is in memory for a waiting sibling alone; when that is aborted, prompt 2 takes its place."""
    expected = sample(make(dtype=torch.float64), [request(2, 0, max_tokens=40)])["2/0"]
    engine = make(slots=2, dtype=torch.float64, window=1)
    for r in (request(0, 0, max_tokens=40), request(1, 0, max_tokens=3), request(2, 0, max_tokens=40)):
        engine.submit(r)
    engine.poll()
    engine.submit(request(1, 1))
    while not any(d.request.id == "2/0" for d in engine.running):
        engine.poll()
    stored = engine.prefixes.pools[32].prefixes
    assert [len(p.tokens) for p in stored] == [3, 4, 12]
    engine.abort("1/1")
    assert [len(p.tokens) for p in stored] == [12, 4]
    s = sample(engine, [])["2/0"]
    assert s.tokens == expected.tokens
    assert s.sampler_logprobs == pytest.approx(expected.sampler_logprobs, abs=1e-10)
