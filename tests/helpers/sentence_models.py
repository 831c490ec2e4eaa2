"""Tiny sentence models as folders, in the form in which sentence-transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

WORDS = ("river", "stream", "town", "tea", "ink", "who", "named", "the", "##s", "founded", "query", "passage", ":")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
CONFIG = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "max_position_embeddings": 32,
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "vocab_size": len(SPECIAL) + len(WORDS),
}


def make_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random weights for CONFIG, always the same for a seed, with the names that a BERT has."""
    draw = np.random.default_rng(seed)
    width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (CONFIG["vocab_size"], width),
        "embeddings.position_embeddings.weight": (CONFIG["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": (2, width),
    }
    norms = ["embeddings.LayerNorm"]
    for number in range(CONFIG["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        for name, rows, columns in (
            *((f"attention.self.{part}", width, width) for part in ("query", "key", "value")),
            ("attention.output.dense", width, width),
            ("intermediate.dense", inner, width),
            ("output.dense", width, inner),
        ):
            shapes |= {f"{layer}.{name}.weight": (rows, columns), f"{layer}.{name}.bias": (rows,)}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name in norms:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return {name: draw.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def write_model(
    folder: Path,
    config: dict[str, object] | None = None,
    weights: dict[str, np.ndarray] | None = None,
    files: dict[str, object] | None = None,
) -> Path:
    """Writes a sentence model and returns its folder.

    `config` changes entries of CONFIG, `weights` replaces the random ones, and `files` has the content of further JSON
    files by their names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    save_file(make_weights() if weights is None else weights, folder / "model.safetensors")
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    # Real folders ask for padding and cutting, which must not count.
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder
