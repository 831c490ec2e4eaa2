"""Shapes of well-known models by name, without their files, to measure speed with random weights.

The numbers are those of the published config.json files.
"""

from __future__ import annotations

from typing import Any

import torch

from cohort.errors import ModelError
from cohort.models.config import ModelConfig
from cohort.models.decoder import Decoder

# The sizes that differ within a family, in the order of the arguments of `_make_hf_config`.
_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
_QWEN = {
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
_QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], **_QWEN}
_QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, **_QWEN}
_LLAMA2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def _make_hf_config(family: dict[str, Any], *sizes: int, **changes: Any) -> dict[str, Any]:
    """Returns the contents of a config.json: those of `family`, with five sizes added and `changes` applied.

    The sizes are hidden size, layers, heads, KV heads and feed-forward size.
    """
    return {**family, **dict(zip(_FIELDS, sizes, strict=True)), **changes}


# Contents of config.json by the name of the shape.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _make_hf_config(_QWEN2, 896, 24, 14, 2, 4864),
    "qwen2.5-1.5b": _make_hf_config(_QWEN2, 1536, 28, 12, 2, 8960),
    "qwen2.5-3b": _make_hf_config(_QWEN2, 2048, 36, 16, 2, 11008),
    "qwen2.5-7b": _make_hf_config(_QWEN2, 3584, 28, 28, 4, 18944, vocab_size=152064, tie_word_embeddings=False),
    "qwen2.5-14b": _make_hf_config(_QWEN2, 5120, 48, 40, 8, 13824, vocab_size=152064, tie_word_embeddings=False),
    "qwen2.5-32b": _make_hf_config(_QWEN2, 5120, 64, 40, 8, 27648, vocab_size=152064, tie_word_embeddings=False),
    "llama-3.1-70b": _make_hf_config(_LLAMA3, 8192, 80, 64, 8, 28672, tie_word_embeddings=False),
    "llama-3.2-1b": _make_hf_config(_LLAMA3, 2048, 16, 32, 8, 8192),
    "llama-2-7b": _make_hf_config(_LLAMA2, 4096, 32, 32, 32, 11008),
    "qwen3-0.6b": _make_hf_config(_QWEN3, 1024, 28, 16, 8, 3072),
    "qwen3-1.7b": _make_hf_config(_QWEN3, 2048, 28, 16, 8, 6144),
    "smollm2-135m": _make_hf_config(_SMOLLM2, 576, 30, 9, 3, 1536),
}


def find_shape(name: str) -> ModelConfig:
    """Returns the config of a well-known model, such as "qwen2.5-7b". Raises ModelError for unknown names."""
    if name not in SHAPES:
        raise ModelError(
            f'with random weights there is no model "{name}"; for --model use one of: {", ".join(sorted(SHAPES))}'
        )
    return ModelConfig.from_hf(SHAPES[name])


def make_random_decoder(
    config: ModelConfig, dtype: torch.dtype, device: str, seed: int = 0, std: float = 0.02
) -> Decoder:
    """Returns a decoder in `dtype` with normal random weights of standard deviation `std`, drawn on the device itself.

    Norms are 1 and biases 0, except the bias of gate and up, which is random too. Billions of weights take seconds this
    way, not minutes. Unlike with `initialise`, the numbers depend on the device.
    """
    with torch.device(device):
        decoder = Decoder(config).to(dtype)
    generator = torch.Generator(device).manual_seed(seed)
    # Norms stay 1 and biases 0, as the decoder creates them, except gate_up_bias, which has two axes.
    with torch.no_grad():
        for p in decoder.parameters():
            if p.ndim >= 2:
                p.normal_(0.0, std, generator=generator)
    return decoder
