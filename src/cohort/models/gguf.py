"""GGUF in, a Hugging Face folder out: weights dequantised to fp32, config and tokenizer from the metadata.

The only module that imports the `gguf` package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from cohort.errors import ModelError, nearest
from cohort.models.config import ModelConfig
from cohort.models.gguf_tokenizer import tokenizer_files
from cohort.models.staging import staged

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SHARD_BYTES = 4 * 10**9

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


def convert(file: str | Path, out: str | Path, progress: Callable[[float], None] = lambda share: None) -> Path:
    """Write the model in a GGUF file as a Hugging Face folder `out` (which must not exist, or be empty)."""
    file, out = Path(file), Path(out)
    reader = _open(file)
    try:
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {t.name: t for t in reader.tensors}
    except (ValueError, IndexError, TypeError, UnicodeDecodeError) as e:
        raise ModelError(f"{file} is corrupted or truncated ({e}): fetch it again") from e
    names = {name: hf_name(name) for name in tensors}
    config = hf_config(
        metadata, tied="output.weight" not in names, vocab_size=int(tensors["token_embd.weight"].shape[1])
    )
    shape = ModelConfig.from_hf(config)
    with staged(out) as folder:
        _write_json(folder / "config.json", config)
        for name, content in tokenizer_files(metadata).items():
            _write_json(folder / name, content)
        shards = _shards({n: 4 * int(np.prod(t.shape)) for n, t in tensors.items()})
        weight_map: dict[str, str] = {}
        done = 0
        for i, shard in enumerate(shards, start=1):
            target = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            arrays = {}
            for name in shard:
                arrays[names[name]] = _array(file, tensors[name], shape)
                done += 1
                progress(done / len(tensors))
            save_file(arrays, folder / target, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(arrays, target)
        if len(shards) > 1:
            _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return out


def hf_config(metadata: dict[str, Any], *, tied: bool, vocab_size: int) -> dict[str, Any]:
    """A config.json from GGUF metadata."""
    kind = str(metadata.get("general.architecture", ""))
    if kind not in ARCHITECTURES:
        raise ModelError(f'GGUF architecture "{kind}" is not supported.{nearest(kind, ARCHITECTURES)}')

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{kind}.{key}", default)

    heads, hidden = get("attention.head_count"), get("embedding_length")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        raise ModelError(f"the GGUF file has no usable {kind}.attention.head_count and {kind}.embedding_length")
    window = get("attention.sliding_window")
    windowed = kind == "llama" and window is not None
    config = {
        "architectures": ["MistralForCausalLM" if windowed else ARCHITECTURES[kind]],
        "model_type": "mistral" if windowed else kind,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", hidden // heads),
        "intermediate_size": get("feed_forward_length"),
        # stored as fp32: 1e-05 comes back as 9.999999747378752e-06
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon', 1e-6):.7g}"),
        "hidden_act": "silu",
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(get),
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
    }
    if windowed:
        config["sliding_window"] = window
    for name in ("bos", "eos", "pad"):
        key = "tokenizer.ggml.padding_token_id" if name == "pad" else f"tokenizer.ggml.{name}_token_id"
        if key in metadata:
            config[f"{name}_token_id"] = metadata[key]
    return config


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor.

    >>> hf_name("blk.3.ffn_down.weight")
    'model.layers.3.mlp.down_proj.weight'
    """
    if name == "rope_freqs.weight":
        raise ModelError(
            "the GGUF file carries its own rope frequencies (Llama 3.1): use the safetensors model instead"
        )
    if (layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)) and layer[2] in _LAYER:
        return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.{layer[3]}"
    if (other := re.fullmatch(r"(\w+)\.(weight|bias)", name)) and other[1] in _OTHER:
        return f"{_OTHER[other[1]]}.{other[2]}"
    raise ModelError(f'GGUF tensor "{name}" is unknown: the model is not a plain Llama, Qwen2 or Qwen3')


def unpermuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Query or key rows as Hugging Face has them: GGUF interleaves Llama's rotary pairs instead of halves."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _open(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as e:
        raise ModelError("reading GGUF needs the gguf package: pip install 'cohort[gguf]'") from e
    if not file.is_file():
        raise ModelError(f"{file} does not exist")
    try:
        return GGUFReader(file)
    except (ValueError, IndexError, OSError, KeyError) as e:
        raise ModelError(f"{file} is not a GGUF file, or corrupted or truncated ({e}): fetch it again") from e


def _array(file: Path, tensor: Any, shape: ModelConfig) -> np.ndarray:
    from gguf import dequantize

    try:
        array = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    except (ValueError, NotImplementedError) as e:
        raise ModelError(f'{file}: tensor "{tensor.name}" ({tensor.tensor_type.name}) cannot be read: {e}') from e
    if shape.architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
        part = tensor.name.split(".")[-2]
        heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}.get(part)
        if heads:
            return unpermuted(array, heads)
    return array.copy()  # out of the memory-mapped file


def _rope_scaling(get: Callable[..., Any]) -> dict[str, Any] | None:
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": get("rope.scaling.factor")}
    if (original := get("rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _shards(sizes: dict[str, int]) -> list[list[str]]:
    def split() -> Iterator[list[str]]:
        shard: list[str] = []
        for name, size in sizes.items():
            if shard and size + sum(sizes[n] for n in shard) > SHARD_BYTES:
                yield shard
                shard = []
            shard = [*shard, name]
        yield shard

    return list(split())


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
