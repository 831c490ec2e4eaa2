"""Tests of the table of shapes: parameter counts as published, and decoders with random weights."""

from __future__ import annotations

import pytest
import torch

from cohort.errors import ModelError
from cohort.models.config import to_hf
from cohort.models.limits import count_layer_params
from cohort.models.shapes import SHAPES, find_shape, make_random_decoder


@pytest.mark.parametrize(
    ("name", "layers", "head", "tied"),
    [
        ("qwen2.5-0.5b", 357.8e6, 136.1e6, True),  # 494.0 M in matrix products
        ("qwen2.5-1.5b", 1310.2e6, 233.4e6, True),  # 1,543.6 M
        ("qwen2.5-3b", 2774.5e6, 311.2e6, True),  # 3,085.7 M
        ("qwen2.5-7b", 6525.3e6, 545.0e6, False),  # 6.53 B without the embedding and the head
        ("qwen3-0.6b", 440.4e6, 155.6e6, True),  # 0.44 B without the embedding
        ("qwen3-1.7b", 1409.3e6, 311.2e6, True),  # 1.4 B without the embedding
        ("smollm2-135m", 106.2e6, 28.3e6, True),  # 134.5 M
    ],
)
def test_parameters_of_the_matrix_products(name, layers, head, tied):
    c = find_shape(name)
    assert count_layer_params(c) == pytest.approx(layers, rel=1e-3)
    assert c.vocab_size * c.hidden == pytest.approx(head, rel=1e-3)
    assert c.tied is tied and c.sliding_window is None


def test_differences_between_the_families():
    qwen2, qwen3, smollm2 = (find_shape(name) for name in ("qwen2.5-7b", "qwen3-0.6b", "smollm2-135m"))
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim, qwen2.vocab_size) == (True, False, 128, 152064)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim, qwen3.hidden) == (False, True, 128, 1024)
    assert (smollm2.qkv_bias, smollm2.qk_norm, smollm2.head_dim, smollm2.norm_eps) == (False, False, 64, 1e-5)
    assert qwen2.rope.parameters["rope_theta"] == qwen3.rope.parameters["rope_theta"] == 1e6


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_survives_its_config_json(name):
    """A shape reaches vLLM as a config.json."""
    config = find_shape(name)
    assert type(config).from_hf(to_hf(config)) == config


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ModelError, match=r'"qwen9".* for --model use one of: .*qwen2.5-0.5b, qwen2.5-1.5b, .*smollm2-135m'
    ):
        find_shape("qwen9")


def test_random_weights(monkeypatch):
    little = {"num_hidden_layers": 1, "vocab_size": 50, "hidden_size": 448, "intermediate_size": 1184}
    little |= {"num_attention_heads": 14, "num_key_value_heads": 2}
    monkeypatch.setitem(SHAPES, "little", {**SHAPES["qwen2.5-7b"], **little})
    config = find_shape("little")
    one, same, other = (make_random_decoder(config, torch.bfloat16, "cpu", seed=seed) for seed in (0, 0, 1))
    assert one.head is not None and torch.equal(one.head, same.head) and not torch.equal(one.head, other.head)
    for name, p in one.named_parameters():
        assert p.dtype == torch.bfloat16
        if p.ndim >= 2:
            assert float(p.detach().float().std()) == pytest.approx(0.02, rel=0.05), name
        else:
            assert set(p.tolist()) == ({0.0} if name.endswith("bias") else {1.0}), name
    assert one.inv_freq.dtype == torch.float32
