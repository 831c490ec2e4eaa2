"""Tests of reading config.json into ModelConfig: what is read, and what is refused with which message."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cohort.errors import ModelError
from cohort.models.config import ModelConfig, check_context, make_rope, to_hf


def make_hf(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """Returns the contents of a config.json with these changes."""
    return {
        "architectures": [architecture],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
    } | changes


def test_llama_fields() -> None:
    c = ModelConfig.from_hf(make_hf(tie_word_embeddings=True))
    assert (c.hidden, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.ff) == (64, 3, 8, 2, 8, 96)
    assert (c.vocab_size, c.norm_eps, c.max_positions, c.tied, c.queries_per_kv) == (100, 1e-5, 512, True, 4)
    assert not (c.qkv_bias or c.out_bias or c.mlp_bias or c.qk_norm)
    assert c.rope.inv_freq == pytest.approx([1.0, 100**-0.25, 0.1, 100**-0.75], rel=1e-7)


def test_architecture_from_model_type_when_not_named() -> None:
    assert ModelConfig.from_hf(make_hf(architectures=None, model_type="qwen3")).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    "architecture, given, expected",
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False, True)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_and_norms_of_each_family(architecture: str, given: dict, expected: tuple) -> None:
    c = ModelConfig.from_hf(make_hf(architecture, **given))
    assert (c.qkv_bias, c.out_bias, c.mlp_bias, c.qk_norm) == expected


def test_head_dim_defaults() -> None:
    assert ModelConfig.from_hf(make_hf("Qwen3ForCausalLM")).head_dim == 128
    assert ModelConfig.from_hf(make_hf("Qwen2ForCausalLM")).head_dim == 8
    assert ModelConfig.from_hf(make_hf(head_dim=32)).head_dim == 32


def test_both_forms_of_rope_are_the_same() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 128}
    old = ModelConfig.from_hf(make_hf(rope_theta=1000.0, rope_scaling={"type": "yarn"} | scaling))
    parameters = {"rope_type": "yarn", "rope_theta": 1000.0} | scaling
    new = ModelConfig.from_hf(
        {k: v for k, v in make_hf().items() if k != "rope_theta"} | {"rope_parameters": parameters}
    )
    assert old == new
    assert old.rope.scale == pytest.approx(0.1 * math.log(4.0) + 1)
    assert old.max_positions == 512  # 4 x 128


def test_yarn_states_its_stretched_context() -> None:
    c = ModelConfig.from_hf(
        make_hf(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512})
    )
    assert c.max_positions == 2048


def test_linear_rope_divides_every_frequency() -> None:
    rope = make_rope({"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}, 4, 64)
    assert rope.inv_freq == pytest.approx([0.25, 0.025], rel=1e-6)


def test_llama3_rope_by_hand() -> None:
    # wavelengths 6.28, 62.8, 628, 6283; context 1000: kept below 250, divided above 1000, mixed between
    rope = make_rope(
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1000,
        },
        8,
        8000,
    )
    keep = (1000 / (200 * math.pi) - 1) / 3
    assert rope.inv_freq == pytest.approx([1.0, 0.1, 0.01 * (keep + (1 - keep) / 8), 0.001 / 8], rel=1e-6)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"architectures": ["Qwen2MoeForCausalLM"]}, ["Qwen2MoeForCausalLM", "Qwen2ForCausalLM"]),
        ({"architectures": ["BertModel"]}, ["BertModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": [], "model_type": "t5"}, ["no architecture"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["longrope", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor", "None"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"vocab_size": None}, ["vocab_size", "None"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_key_value_heads": 3}, ["8", "3"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
    ],
)
def test_refusals_are_one_clear_line(changes: dict, words: list[str]) -> None:
    with pytest.raises(ModelError) as e:
        ModelConfig.from_hf(make_hf(**changes))
    assert "\n" not in str(e.value)
    assert all(word in str(e.value) for word in words), str(e.value)


@pytest.mark.parametrize(
    "architecture, given, window",
    [
        ("LlamaForCausalLM", {"sliding_window": 16}, None),  # Llama has no such setting
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("MistralForCausalLM", {"sliding_window": 256}, 256),
        ("MistralForCausalLM", {}, 4096),  # what transformers assumes
        ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": False}, None),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
            None,
        ),
        ("Qwen2ForCausalLM", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, 16),
        ("Qwen3ForCausalLM", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["full_attention"] * 3},
            None,
        ),
    ],
)
def test_sliding_window_in_force(architecture: str, given: dict, window: int | None) -> None:
    assert ModelConfig.from_hf(make_hf(architecture, **given)).sliding_window == window


def test_check_context() -> None:
    windowed = ModelConfig.from_hf(make_hf("MistralForCausalLM", sliding_window=256))
    check_context(windowed, 256)
    with pytest.raises(ModelError, match=r"sliding window is 256 tokens, but prompt and completion take 257"):
        check_context(windowed, 257)
    plain = ModelConfig.from_hf(make_hf())
    check_context(plain, 512)
    with pytest.raises(ModelError, match=r"context is 512 tokens, but prompt and completion take 513"):
        check_context(plain, 513)


@pytest.mark.parametrize(
    "given",
    [
        make_hf(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        make_hf("MistralForCausalLM", sliding_window=None),
        make_hf("MistralForCausalLM", sliding_window=99, head_dim=16),
        make_hf("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=9, max_window_layers=0),
        make_hf("Qwen3ForCausalLM", rope_scaling={"rope_type": "linear", "factor": 2.0}),
        make_hf(rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}),
    ],
)
def test_to_hf_is_read_back_as_the_same_config(given: dict) -> None:
    c = ModelConfig.from_hf(given)
    assert ModelConfig.from_hf(to_hf(c)) == c


def test_to_hf_keeps_the_original() -> None:
    original = make_hf(some_key="kept")
    written = to_hf(ModelConfig.from_hf(original), original)
    assert written == original
    assert written is not original
