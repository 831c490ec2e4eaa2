"""The native engine against one sequence at a time: same distribution, same samples, whatever else runs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cohort.engines.base import Request, sample
from cohort.engines.native import engine as native
from cohort.engines.native.attention import plan_prompts
from cohort.engines.native.engine import NativeEngine
from cohort.engines.native.random import derive_random_stream, draw_uniforms
from cohort.models.decoder import Decoder
from cohort.types import Key, Sample, Sampling
from tests.helpers.decoders_and_groups import TOLERANCE, naive_logprobs, plain_attention, small_decoder
from tests.helpers.engine_conformance import SameWeights, spell

# (prompt length, siblings, longest completion): four length classes, few and many siblings, unequal ends
LOAD = [(1, 3, 20), (5, 9, 12), (31, 1, 40), (33, 4, 9), (40, 1, 1), (64, 2, 30), (70, 5, 25), (3, 1, 70)]
DTYPES = [torch.float64, torch.float32]
FAMILIES = [
    {},
    {"num_heads": 4, "num_kv_heads": 4, "tied": False},
    {"num_heads": 14, "num_kv_heads": 2, "qkv_bias": True},
    {"num_heads": 8, "num_kv_heads": 1, "head_dim": 16, "qk_norm": True, "mlp_bias": True},
]


def load_requests(seed: int = 0, own: bool = False, **sampling) -> list[Request]:
    """Returns one request per sibling of LOAD. With `own`, each prompt has some tokens of its own at its end."""
    rng = random.Random(seed)
    requests = []
    for p, (length, siblings, longest) in enumerate(LOAD):
        prompt = [rng.randrange(61) for _ in range(length)]
        for i in range(siblings):
            more = [rng.randrange(61) for _ in range(rng.randrange(12))] if own else []
            requests.append(
                Request(
                    id=f"{p}/{i}",
                    tokens=prompt + more,
                    sampling=Sampling(
                        max_tokens=max(1, longest - 2 * i), stop_ids=(7 + i, 8 + p)[: 1 + p % 2], **sampling
                    ),
                    key=Key(seed=seed, purpose="train", task="t", prompt_id=str(p), visit=0, sample=i),
                    shared=length,
                )
            )
    return requests


def run(decoder: Decoder, requests: list[Request], slots: int = 64, window: int = 8) -> dict[str, Sample]:
    return sample(NativeEngine(decoder, spell, slots=slots, max_context=512, window=window), requests)


@torch.no_grad()
def assert_logprobs(decoder: Decoder, requests: list[Request], samples: dict[str, Sample], tolerance: float) -> None:
    for r in requests:
        s = samples[r.id]
        expected = naive_logprobs(decoder, r.tokens, s.tokens, r.sampling.temperature or 1.0)
        gap = (torch.tensor(s.sampler_logprobs, dtype=expected.dtype) - expected).abs().max().item()
        assert gap <= tolerance, f"{r.id}: {gap}"


@torch.no_grad()
def naive_sample(decoder: Decoder, r: Request) -> list[int]:
    """Draws by the definition: a full forward and one uniform number per token, inverse CDF by a plain sum."""
    tokens, drawn = list(r.tokens), []
    while len(drawn) < r.sampling.max_tokens:
        hidden = decoder(torch.tensor(tokens), torch.arange(len(tokens)), plain_attention())
        probs = F.softmax(decoder.logits(hidden[-1:]) / r.sampling.temperature, dim=-1)[0].double()
        u = draw_uniforms(torch.tensor([derive_random_stream(r.key)]), torch.tensor([r.start + len(drawn)]))
        token = int((probs.cumsum(0) <= u * probs.sum()).sum())
        tokens.append(token)
        drawn.append(token)
        if token in r.sampling.stop_ids:
            break
    return drawn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("slots", [64, 5])
def test_sampler_logprobs_equal_one_sequence_at_a_time(dtype: torch.dtype, own: bool, slots: int):
    decoder, requests = small_decoder(dtype), load_requests(own=own)
    assert_logprobs(decoder, requests, run(decoder, requests, slots), TOLERANCE[dtype])


@pytest.mark.parametrize("changes", FAMILIES)
def test_sampler_logprobs_in_every_family(changes: dict):
    decoder, requests = small_decoder(torch.float64, **changes), load_requests(own=True)
    assert_logprobs(decoder, requests, run(decoder, requests, slots=6), 1e-10)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.3])
def test_sampler_logprobs_are_at_the_sampling_temperature(temperature: float):
    decoder, requests = small_decoder(torch.float64), load_requests(temperature=temperature)
    assert_logprobs(decoder, requests, run(decoder, requests), 1e-10)


def test_sampler_logprobs_are_before_truncation():
    decoder, requests = small_decoder(torch.float64), load_requests(top_p=0.8, top_k=20, min_p=0.01)
    assert_logprobs(decoder, requests, run(decoder, requests), 1e-10)


@torch.no_grad()
def test_kept_mass_is_the_probability_of_what_could_be_drawn():
    decoder, requests = small_decoder(torch.float64), load_requests(top_k=3)
    samples = run(decoder, requests, slots=9)
    for r in requests:
        s = samples[r.id]
        tokens = torch.tensor(r.tokens + s.tokens)
        hidden = decoder(tokens, torch.arange(len(tokens)), plain_attention())
        best = decoder.logits(hidden).softmax(-1).topk(3)
        before = slice(len(r.tokens) - 1, -1)
        assert s.kept_mass == pytest.approx(best.values[before].sum(-1).tolist(), abs=1e-10)
        assert all(t in top for t, top in zip(s.tokens, best.indices[before].tolist(), strict=True))


def test_a_prompt_with_many_siblings_among_single_ones():
    """Padding every prompt to 40 siblings would waste work: the one with 40 is read several times instead."""
    decoder, requests = small_decoder(torch.float64), []
    for p in range(13):
        for i in range(40 if p == 6 else 1):
            requests.append(
                Request(
                    id=f"{p}/{i}",
                    tokens=[p + 1, 3, 5 + p, 2][: 1 + p % 4],
                    sampling=Sampling(max_tokens=5 + i % 3),
                    key=Key(seed=0, purpose="train", task="t", prompt_id=str(p), visit=0, sample=i),
                )
            )
    engine = NativeEngine(decoder, spell, slots=64, max_context=512, window=1)
    for r in requests:
        engine.submit(r)
    engine.poll()
    drafts = engine.running
    part = plan_prompts([d.prefix for d in drafts], torch.float64, torch.device("cpu")).pools[0]
    assert part.num_prompts * part.rows_per_prompt < 2 * len(drafts) and part.num_prompts > 13
    samples = run(decoder, requests)
    assert_logprobs(decoder, requests, samples, 1e-10)


def test_samples_equal_the_definition():
    decoder, requests = small_decoder(torch.float64), load_requests(own=True)[::2]
    samples = run(decoder, requests, slots=5)
    for r in requests:
        assert samples[r.id].tokens == naive_sample(decoder, r), r.id


def test_greedy_is_the_most_probable_token():
    decoder, requests = small_decoder(torch.float64), load_requests(temperature=0.0)[::3]
    samples = run(decoder, requests)
    for r in requests:
        tokens = torch.tensor(r.tokens + samples[r.id].tokens)
        with torch.no_grad():
            hidden = decoder(tokens, torch.arange(len(tokens)), plain_attention())
        best = decoder.logits(hidden).argmax(-1)[len(r.tokens) - 1 : -1]
        assert samples[r.id].tokens == best.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_do_not_depend_on_slots_order_or_other_requests(dtype: torch.dtype):
    decoder, requests = small_decoder(dtype), load_requests(own=True)
    reference = {k: s.tokens for k, s in run(decoder, requests).items()}
    shuffled = random.Random(5).sample(requests, len(requests))
    for others, slots, window in (
        (shuffled, 64, 8),
        (requests[::-1], 3, 1),
        (shuffled, 7, 5),
        (shuffled[:6], 1, 8),
    ):
        for id, s in run(decoder, others, slots, window).items():
            assert s.tokens == reference[id]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [1, 5, 18])
def test_continuing_a_partial_sample_gives_the_rest(dtype: torch.dtype, cut: int):
    decoder, requests = small_decoder(dtype), load_requests()
    whole = run(decoder, requests)
    rest = [
        Request(
            id=r.id,
            tokens=r.tokens + whole[r.id].tokens[:cut],
            sampling=Sampling(max_tokens=r.sampling.max_tokens - cut, stop_ids=r.sampling.stop_ids),
            key=r.key,
            shared=r.shared,
            start=cut,
        )
        for r in requests
        if len(whole[r.id].tokens) > cut
    ]
    assert len(rest) >= 5
    for id, s in run(decoder, rest, slots=4).items():
        assert s.tokens == whole[id].tokens[cut:]
        assert s.sampler_logprobs == pytest.approx(whole[id].sampler_logprobs[cut:], abs=TOLERANCE[dtype])


def test_load_under_way_continues_with_the_new_weights():
    """After the load every token is drawn as the new weights alone would, given what was drawn before."""
    old, new = small_decoder(torch.float64), small_decoder(torch.float64, seed=1)
    decoder = small_decoder(torch.float64)
    requests = load_requests(own=True)
    engine = NativeEngine(decoder, spell, slots=20, max_context=512)
    engine.load(SameWeights(decoder), version=10)
    for r in requests:
        engine.submit(r)
    done: dict[str, Sample] = {}

    def poll() -> bool:
        events = engine.poll()
        done.update({e.id: e.sample for e in events if e.sample is not None})
        return bool(events)

    poll()
    with torch.no_grad():
        for mine, theirs in zip(decoder.parameters(), new.parameters(), strict=True):
            mine.copy_(theirs)  # in place, like an optimizer step
    engine.load(SameWeights(decoder), version=11)
    while poll():
        pass
    mixed = 0
    for r in requests:
        s = done[r.id]
        spans = {v: k for k, v in s.versions}
        assert [v for _, v in s.versions] in ([10], [11], [10, 11])
        change = spans.get(11, len(s.tokens))
        mixed += 0 < change < len(s.tokens)
        for decoder_of_part, part in ((old, slice(0, change)), (new, slice(change, None))):
            with torch.no_grad():
                expected = naive_logprobs(decoder_of_part, r.tokens, s.tokens)[part].tolist()
            assert s.sampler_logprobs[part] == pytest.approx(expected, abs=1e-10)
        begun = Request(
            id=r.id,
            tokens=r.tokens + s.tokens[:change],
            sampling=Sampling(max_tokens=max(1, r.sampling.max_tokens - change), stop_ids=r.sampling.stop_ids),
            key=r.key,
            start=change,
        )
        if change < len(s.tokens):
            assert s.tokens[change:] == naive_sample(new, begun)
    assert mixed >= 8


def test_own_tokens_longer_than_one_segment(monkeypatch):
    """Continuations are computed in bounded segments and row blocks; the bounds change nothing."""
    decoder, requests = small_decoder(torch.float64), load_requests(own=True)
    reference = run(decoder, requests)
    monkeypatch.setattr(native, "EXTEND_TOKENS", 3)
    monkeypatch.setattr(native, "EXTEND_ROWS", 4)
    monkeypatch.setattr(native, "PREFILL_TOKENS", 40)
    monkeypatch.setattr(native, "MAX_LOGITS", 61 * 5)
    monkeypatch.setattr(native, "FIRST_ROOM", 1)
    small = run(decoder, requests)
    assert {k: s.tokens for k, s in small.items()} == {k: s.tokens for k, s in reference.items()}
    assert_logprobs(decoder, requests, small, 1e-10)


def test_used_engine_samples_bit_for_bit_as_a_fresh_one():
    """Earlier requests (larger memory, other pools) change no bit: a resumed run starts with a fresh engine."""
    decoder, requests = small_decoder(head_dim=32), load_requests(own=True)
    used = NativeEngine(decoder, spell, slots=7, max_context=512)
    sample(used, load_requests(seed=3, own=True))
    sample(used, [replace(requests[0], sampling=Sampling(max_tokens=300))])
    assert sample(used, requests) == run(decoder, requests, slots=7)
