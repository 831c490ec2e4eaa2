"""Packed weights: they give exactly the model (fp16: with rounded matrices) and are packed again at every load."""

from __future__ import annotations

import copy

import pytest
import torch

from cohort.engines.base import sample
from cohort.engines.native.engine import NativeEngine
from cohort.errors import ConfigError
from cohort.models.decoder import Decoder
from tests.helpers.decoders_and_groups import naive_logprobs, small_decoder
from tests.helpers.engine_conformance import EngineConformance, SameWeights, request, spell

BIASED = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied": False}


def make(decoder: Decoder, slots: int = 4, kind: str = "fp16") -> NativeEngine:
    return NativeEngine(decoder, spell, slots=slots, max_context=200, weights=kind)


def rounded(decoder: Decoder) -> Decoder:
    """Returns a copy with matrices rounded to fp16. Embedding table, norms and biases are not rounded."""
    decoder = copy.deepcopy(decoder)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            if p.ndim > 1 and name != "embed" and "bias" not in name:
                p.copy_(p.half().float())
    return decoder


class TestConformance(EngineConformance):
    def make(self, slots: int = 4) -> NativeEngine:
        return make(small_decoder(), slots)


def test_logprobs_are_those_of_the_rounded_matrices():
    decoder = small_decoder(**BIASED)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            if "bias" in name:
                p.normal_(generator=torch.Generator().manual_seed(1))
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    samples = sample(make(decoder), [request(p, i) for p in range(3) for i in range(3)])
    assert all(torch.equal(p, before[name]) for name, p in decoder.named_parameters())
    gaps = {"rounded": 0.0, "exact": 0.0}
    for id, s in samples.items():
        prompt = request(int(id[0])).tokens
        for name, model in (("rounded", rounded(decoder)), ("exact", decoder)):
            with torch.no_grad():
                expected = naive_logprobs(model, prompt, s.tokens)
            gap = (torch.tensor(s.sampler_logprobs) - expected).abs().max().item()
            gaps[name] = max(gaps[name], gap)
    assert gaps["rounded"] < 2e-5 < gaps["exact"] < 5e-2


@pytest.mark.parametrize("kind", ["packed", "fp16"])
def test_load_packs_again(kind):
    decoder = small_decoder()
    engine = make(decoder, kind=kind)
    before = sample(engine, [request()])["0/0"].tokens
    engine.submit(request())
    engine.poll()
    with torch.no_grad():
        decoder.layers[0].qkv.mul_(-2)
    engine.load(SameWeights(decoder), version=1)
    engine.abort("0/0")
    after = sample(engine, [request()])["0/0"].tokens
    assert after == sample(make(decoder, kind=kind), [request()])["0/0"].tokens != before


def test_an_idle_engine_holds_no_copies():
    engine = make(small_decoder(), kind="packed")
    sample(engine, [request()])
    assert engine.packed is not None and not engine.packed.products


def test_packed_is_exact():
    decoder = small_decoder(**BIASED)
    samples = sample(make(decoder, kind="packed"), [request(p, i) for p in range(3) for i in range(3)])
    for id, s in samples.items():
        with torch.no_grad():
            expected = naive_logprobs(decoder, request(int(id[0])).tokens, s.tokens)
        assert (torch.tensor(s.sampler_logprobs) - expected).abs().max() < 2e-5


def test_only_float32_can_be_packed():
    with pytest.raises(ConfigError, match=r"float64 on cpu"):
        make(small_decoder(torch.float64))
