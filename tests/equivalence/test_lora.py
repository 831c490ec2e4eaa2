"""Tests that merged adapters give the same outputs and gradients as adapters that are computed separately."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cohort.config.schema import TARGETS, LoraConfig
from cohort.errors import ModelError
from cohort.models.decoder import Decoder, hf_views, redirect_gradients, to_hf_shape
from cohort.models.lora import Adapters
from tests.helpers.decoders_and_groups import plain_attention, small_decoder

SHAPES = {
    "gqa": {},
    "one kv head": {"num_kv_heads": 1},
    "as many kv heads": {"num_kv_heads": 6},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "untied": {"tied": False},
    "qk norms": {"qk_norm": True},
}
LORA = LoraConfig(rank=3, alpha=5.0)
TOKENS = torch.arange(23) * 7 % 61


def randomise_factors(adapters: Adapters, seed: int = 1, std: float = 0.2) -> None:
    """Fills A and B with random numbers, so that no gradient is zero, and merges them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, p in sorted(adapters.named_parameters()):
            p.copy_(torch.randn(p.shape, generator=generator) * std)
    adapters.merge()


def find_rows(decoder: Decoder, target: str) -> torch.Tensor:
    """Returns the rows of a target matrix within the decoder's qkv, gate_up or other matrix, written out."""
    c = decoder.config
    g, D = c.queries_per_kv, c.head_dim
    inner = {"q_proj": range(g), "k_proj": [g], "v_proj": [g + 1]}
    if target in inner:
        return torch.tensor(
            [(k * (g + 2) + i) * D + d for k in range(c.num_kv_heads) for i in inner[target] for d in range(D)]
        )
    first = c.ff if target == "up_proj" else 0
    return torch.arange(first, first + (c.ff if target in ("gate_proj", "up_proj") else c.hidden))


def compute_adapters_apart(
    monkeypatch: pytest.MonkeyPatch, decoder: Decoder, base: Decoder, adapters: Adapters
) -> None:
    """Makes the decoder compute x W0^T + s (x A^T) B^T from now on, with gradients by autograd."""
    fused = {"qkv": ("q_proj", "k_proj", "v_proj"), "out": ("o_proj",)}
    fused |= {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
    known = {}
    for i, layer in enumerate(decoder.layers):
        for part, targets in fused.items():
            here = [(find_rows(decoder, t), adapters.layers[i][t]) for t in targets if t in adapters.layers[i]]
            matrix = getattr(base.layers[i], part).detach().flatten(0, -2)
            known[getattr(layer, part).data_ptr()] = (matrix, here)

    def linear(x, weight, bias=None, collect=None):
        matrix, here = known[weight.data_ptr()]
        y = F.linear(x, matrix, bias)
        for rows, adapter in here:
            y = y.index_add(1, rows, adapter.scale * (x @ adapter.A.t()) @ adapter.B.t())
        return y

    def apply_gated_unit(x, gate_up, gate_up_bias, down, down_bias, *collectors):
        gate, up = linear(x, gate_up, gate_up_bias).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, down, down_bias)

    monkeypatch.setattr("cohort.models.decoder.linear", linear)
    monkeypatch.setattr("cohort.models.decoder.apply_gated_unit", apply_gated_unit)


def compute_hidden_and_gradients(decoder: Decoder, adapters: Adapters) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the hidden states of TOKENS, and the gradients of a random linear function of them."""
    adapters.zero_grad()
    embedded = decoder.embed.detach().index_select(0, TOKENS).requires_grad_()
    hidden = decoder(TOKENS, torch.arange(len(TOKENS)), plain_attention(), embedded)
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)).to(hidden.dtype)
    (hidden * direction).sum().backward()
    return hidden.detach(), {n: p.grad.clone() for n, p in adapters.named_parameters()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_forward_and_gradients_are_those_of_adapters_apart(monkeypatch, shape, dtype, bound):
    decoder, base = (small_decoder(dtype, std=0.15, **SHAPES[shape]) for _ in range(2))
    for name, p in decoder.named_parameters():  # biases that are not zero
        if name.endswith("_bias"):
            p.data.copy_(torch.linspace(-0.5, 0.5, p.numel()).view(p.shape))
            dict(base.named_parameters())[name].data.copy_(p.data)
    adapters = Adapters(decoder, LORA)
    randomise_factors(adapters)
    with redirect_gradients(decoder, adapters.collectors()):
        merged, got = compute_hidden_and_gradients(decoder, adapters)
    assert len(got) == 2 * len(TARGETS) * 2
    assert all(p.grad is None for p in decoder.parameters())
    compute_adapters_apart(monkeypatch, decoder, base, adapters)
    expected, want = compute_hidden_and_gradients(decoder, adapters)
    assert (merged - expected).abs().max() <= bound * expected.abs().max()
    for name, gradient in want.items():
        assert gradient.abs().max() > 0, name
        assert (got[name] - gradient).abs().max() <= bound * gradient.abs().max(), name


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_alone(monkeypatch, target):
    """Only the target's rows change, and only it gets gradients, which equal those of autograd."""
    decoder, base = small_decoder(torch.float64), small_decoder(torch.float64)
    adapters = Adapters(decoder, LoraConfig(rank=2, alpha=3.0, targets=(target,)))
    randomise_factors(adapters)
    for (name, mine), (_, before) in zip(hf_views(decoder), hf_views(base), strict=True):
        assert torch.equal(mine, before) == (f".{target}." not in name), name
    with redirect_gradients(decoder, adapters.collectors()):
        merged, got = compute_hidden_and_gradients(decoder, adapters)
    assert sorted(got) == [f"layers.{i}.{target}.{x}" for i in range(2) for x in "AB"]
    compute_adapters_apart(monkeypatch, decoder, base, adapters)
    expected, want = compute_hidden_and_gradients(decoder, adapters)
    assert (merged - expected).abs().max() <= 1e-10 * expected.abs().max()
    assert all((got[n] - want[n]).abs().max() <= 1e-10 * want[n].abs().max() for n in want)


def test_gradients_add_up():
    decoder = small_decoder(torch.float64)
    adapters = Adapters(decoder, LORA)
    randomise_factors(adapters)
    with redirect_gradients(decoder, adapters.collectors()):
        _, once = compute_hidden_and_gradients(decoder, adapters)
        embedded = decoder.embed.detach().index_select(0, TOKENS).requires_grad_()
        hidden = decoder(TOKENS, torch.arange(len(TOKENS)), plain_attention(), embedded)
        direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)).to(hidden.dtype)
        (2 * hidden * direction).sum().backward()
    for name, p in adapters.named_parameters():
        torch.testing.assert_close(p.grad, 3 * once[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_merged_weights_are_the_rounded_sum_in_the_storage_the_decoder_had(dtype, monkeypatch):
    monkeypatch.setattr("cohort.models.lora.PIECE", 700)  # several pieces per matrix
    decoder, base = small_decoder(dtype), small_decoder(dtype)
    addresses = [p.data_ptr() for p in decoder.parameters()]
    adapters = Adapters(decoder, LORA)
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), base.parameters(), strict=True))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    assert {p.dtype for p in adapters.parameters()} == {exact}
    randomise_factors(adapters)
    for (name, mine), (_, before) in zip(hf_views(decoder), hf_views(base), strict=True):
        adapter = adapters.by_name.get(name.removesuffix(".weight"))
        if adapter is None:
            assert torch.equal(mine, before), name
        else:
            merged = to_hf_shape(name, before).double() + 5.0 / 3 * (adapter.B.double() @ adapter.A.double())
            close = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
            torch.testing.assert_close(to_hf_shape(name, mine).double(), merged, rtol=close, atol=close)
    assert [p.data_ptr() for p in decoder.parameters()] == addresses


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_hold_base_gives_the_base_and_then_restores_every_bit(dtype):
    decoder, base = small_decoder(dtype), small_decoder(dtype)
    adapters = Adapters(decoder, LORA)
    randomise_factors(adapters)
    merged = [p.detach().clone() for p in decoder.parameters()]
    assert not torch.equal(decoder.layers[0].qkv, base.layers[0].qkv)
    with adapters.hold_base():
        assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), base.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), merged, strict=True))
    with pytest.raises(KeyError), adapters.hold_base():
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), merged, strict=True))


def test_number_of_trained_entries_and_bytes_of_the_base():
    """q [48, 32] and down [32, 40] of two layers, rank 3: A and B of each, and the base in its own type."""
    adapters = Adapters(small_decoder(torch.bfloat16), LoraConfig(rank=3, targets=("q_proj", "down_proj")))
    assert adapters.num_params == 2 * 3 * (48 + 32 + 32 + 40)
    assert adapters.base_bytes == 2 * 2 * (48 * 32 + 32 * 40)


def test_recomputed_layers_give_the_same_gradients():
    """Where memory is short a layer's forward runs again in the backward."""
    decoder = small_decoder(torch.float64)
    adapters = Adapters(decoder, LORA)
    randomise_factors(adapters)
    with redirect_gradients(decoder, adapters.collectors()):
        hidden, expected = compute_hidden_and_gradients(decoder, adapters)
        decoder.recompute = True
        again, got = compute_hidden_and_gradients(decoder, adapters)
    assert torch.equal(again, hidden)
    assert all(torch.equal(got[n], g) for n, g in expected.items())


def test_factors_begin_as_pefts_do_and_follow_from_the_seed():
    first, again, other = (Adapters(small_decoder(), LORA, seed) for seed in (0, 0, 1))
    for name, p in first.named_parameters():
        assert torch.equal(p, dict(again.named_parameters())[name])
        if name.endswith("A"):
            bound = p.shape[1] ** -0.5  # kaiming-uniform with a = sqrt 5
            assert 0.9 * bound < p.abs().max() <= bound
            assert not torch.equal(p, dict(other.named_parameters())[name])
        else:
            assert not p.any()


def test_an_unknown_target_is_refused():
    with pytest.raises(ModelError, match=r'names "q", which is no matrix that can be adapted: use some of q_proj'):
        Adapters(small_decoder(), LoraConfig(rank=1, targets=("q",)))
