"""Translation of a GGUF file's metadata into a config.json, and of its tensor names into those of Hugging Face."""

from __future__ import annotations

import re
from typing import Any

from cohort.errors import ModelError

# transformers class by GGUF architecture.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Hugging Face name by GGUF name: within a layer, and outside of layers.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def make_hf_config(metadata: dict[str, Any], *, tied: bool, vocab_size: int) -> dict[str, Any]:
    """Returns the contents of a config.json for the model that GGUF metadata (key to value) describe.

    `tied` tells whether the head uses the embedding's weights. `vocab_size` is the number of rows of the embedding. The
    type of the weights is not in the result. Raises ModelError for an architecture that is not supported, and for sizes
    that are missing or not numbers.
    """
    read = _MetadataNumbers(metadata)
    kind = read.architecture
    heads = read("attention.head_count")
    hidden = read("embedding_length")
    window = read("attention.sliding_window", None)
    # GGUF has no architecture of its own for Mistral: it is a Llama with a sliding window.
    windowed = kind == "llama" and window is not None
    config = {
        "architectures": ["MistralForCausalLM" if windowed else ARCHITECTURES[kind]],
        "model_type": "mistral" if windowed else kind,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": read("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("attention.head_count_kv", heads),
        "head_dim": read("attention.key_length", hidden // max(heads, 1)),
        "intermediate_size": read("feed_forward_length"),
        # GGUF stores it as fp32, so 1e-05 is read as 9.999999747378752e-06. Seven digits restore it.
        "rms_norm_eps": float(f"{read('attention.layer_norm_rms_epsilon', 1e-6):.7g}"),
        "hidden_act": "silu",
        "max_position_embeddings": read("context_length"),
        "rope_theta": read("rope.freq_base", 10000.0),
        "rope_scaling": _read_rope_scaling(read),
        "tie_word_embeddings": tied,
        # The version whose layout this is. Without it, transformers 5 warns that the tokenizer is a faulty Mistral one.
        "transformers_version": "4.57.0",
    }
    if windowed:
        config["sliding_window"] = window
    for name in ("bos", "eos", "pad"):
        key = "tokenizer.ggml.padding_token_id" if name == "pad" else f"tokenizer.ggml.{name}_token_id"
        if key in metadata:
            config[f"{name}_token_id"] = metadata[key]
    return config


def to_hf_name(name: str) -> str:
    """Returns the Hugging Face name of the GGUF tensor `name`. Raises ModelError if it has none.

    >>> to_hf_name("blk.3.ffn_down.weight")
    'model.layers.3.mlp.down_proj.weight'
    """
    if name == "rope_freqs.weight":
        raise ModelError(
            "the GGUF file carries its own rope frequencies, as Llama 3.1 does, which is not supported: "
            "use the safetensors version of the model (cohort pull OWNER/NAME)"
        )
    if (layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)) and layer[2] in _LAYER:
        return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.{layer[3]}"
    if (other := re.fullmatch(r"(\w+)\.(weight|bias)", name)) and other[1] in _OTHER:
        return f"{_OTHER[other[1]]}.{other[2]}"
    raise ModelError(
        f'GGUF tensor "{name}" is unknown: the model in the file is not a plain Llama, Qwen2 or Qwen3. '
        "Use one that is, or the safetensors version of this one (cohort pull OWNER/NAME)"
    )


class _MetadataNumbers:
    """Reader for those numbers in GGUF metadata whose keys begin with the name of the architecture."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata
        self.architecture = str(metadata.get("general.architecture", ""))
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f'GGUF architecture "{self.architecture}" is not supported, only {", ".join(ARCHITECTURES)} are: '
                "use the safetensors version of the model (cohort pull OWNER/NAME)"
            )

    def __call__(self, key: str, *default: Any) -> Any:
        """Returns the number under `key`, or the default where it is missing.

        Raises ModelError if the value is not a number, or missing without a default.
        """
        name = f"{self.architecture}.{key}"
        if name not in self.metadata and default:
            return default[0]
        value = self.metadata.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            if value is None:
                raise ModelError(
                    f"the GGUF file has no {name} in its metadata, so it is incomplete: choose another file"
                )
            raise ModelError(
                f"{name} in the metadata of the GGUF file is not a single number, which is not supported: "
                "use the safetensors version of the model (cohort pull OWNER/NAME)"
            )
        return value


def _read_rope_scaling(read: _MetadataNumbers) -> dict[str, Any] | None:
    """Returns the value of "rope_scaling" for config.json: type and factor, and the original context if it is named.

    Returns None if the metadata that `read` looks up name no scaling. Raises ModelError if the factor is missing. The
    type is not checked.
    """
    kind = str(read.metadata.get(f"{read.architecture}.rope.scaling.type", "none"))
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": read("rope.scaling.factor")}
    if (original := read("rope.scaling.original_context_length", None)) is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling
