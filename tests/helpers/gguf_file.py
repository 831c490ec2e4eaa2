"""Writer of small GGUF files, in the layout of llama.cpp's converter: the rotary pairs of Llama are interleaved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cohort.models.config import ModelConfig, make_rope
from cohort.models.decoder import Decoder, hf_views, initialise, to_hf_shape
from tests.helpers.chat_templates import SMOLLM2, write_tokenizer

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def make_decoder(kind: str, vocab_size: int, tied: bool = True, hidden: int = 32) -> Decoder:
    """Returns a small decoder of GGUF architecture `kind` with random weights."""
    decoder = Decoder(
        ModelConfig(
            architecture=ARCHITECTURES[kind],
            vocab_size=vocab_size,
            hidden=hidden,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=hidden // 4,
            ff=2 * hidden,
            norm_eps=1e-5,
            rope=make_rope({"rope_theta": 5000.0}, hidden // 4, 256),
            max_positions=256,
            tied=tied,
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
        )
    )
    initialise(decoder, seed=1)
    return decoder


def interleave_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the rows of each head: row 0 of its first and of its second half, then row 1 of both, and so on."""
    heads = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.stack([heads[:, 0], heads[:, 1]], axis=2).reshape(rows.shape)


def write_gguf(
    file: Path, kind: str = "llama", packed: str = "", tied: bool = True, **extra: Any
) -> tuple[Decoder, Path]:
    """Writes a GGUF file. Returns the decoder that it holds and the folder of the tokenizer that it was made from.

    `packed` names the format of the matrices. In formats that the gguf package cannot pack they are random bits.
    `extra` may have: hidden (size), model and pre (of the tokenizer), tensors (names of superfluous tensors).
    """
    folder = write_tokenizer(file.with_suffix(""))
    spec = json.loads((folder / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"] | {t["content"]: t["id"] for t in spec["added_tokens"]}
    tokens = sorted(vocab, key=lambda t: vocab[t])
    special = {t["content"]: 3 if t["special"] else 4 for t in spec["added_tokens"]}
    decoder = make_decoder(kind, len(tokens), tied, extra.get("hidden", 32))
    c = decoder.config

    w = gguf.GGUFWriter(file, kind)
    w.add_block_count(c.num_layers)
    w.add_context_length(c.max_positions)
    w.add_embedding_length(c.hidden)
    w.add_feed_forward_length(c.ff)
    w.add_head_count(c.num_heads)
    w.add_head_count_kv(c.num_kv_heads)
    w.add_key_length(c.head_dim)
    w.add_rope_freq_base(5000.0)
    w.add_layer_norm_rms_eps(c.norm_eps)
    w.add_tokenizer_model(extra.get("model", "gpt2"))
    w.add_tokenizer_pre(extra.get("pre", "smollm"))
    w.add_token_list(tokens)
    w.add_token_types([special.get(t, 1) for t in tokens])
    w.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in spec["model"]["merges"]])
    w.add_bos_token_id(vocab["<|endoftext|>"])
    w.add_eos_token_id(vocab["<|im_end|>"])
    w.add_chat_template(SMOLLM2)
    for name, view in hf_views(decoder):
        array = to_hf_shape(name, view).numpy().copy()
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = interleave_pairs(array, c.num_heads if "q_proj" in name else c.num_kv_heads)
        if packed and array.ndim == 2:
            form = gguf.GGMLQuantizationType[packed]
            w.add_tensor(to_gguf_name(name), pack_array(array, form), raw_dtype=form)
        else:
            w.add_tensor(to_gguf_name(name), array)
    for name in extra.get("tensors", ()):
        w.add_tensor(name, np.ones(4, dtype=np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return decoder, folder


def pack_array(array: np.ndarray, form: gguf.GGMLQuantizationType) -> np.ndarray:
    """Returns the array packed in this format, or random blocks where the gguf package cannot pack it."""
    try:
        return gguf.quantize(array, form)
    except NotImplementedError:
        weights, size = gguf.GGML_QUANT_SIZES[form]
        shape = (array.shape[0], array.shape[1] // weights * size)
        # Bytes below 48, so that no scale is infinite.
        return np.random.default_rng(0).integers(0, 48, shape, dtype=np.uint8)


def to_gguf_name(name: str) -> str:
    """Returns the GGUF name of a Hugging Face tensor."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"
