"""A tokenizer.json and tokenizer_config.json rebuilt from the vocabulary in GGUF metadata."""

from __future__ import annotations

from array import array
from typing import Any

from cohort.errors import ModelError, nearest

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types of the format
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# how text is cut before merging, by the name llama.cpp knows it under
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def tokenizer_files(metadata: dict[str, Any], vocab_size: int) -> dict[str, dict[str, Any]]:
    """File name -> content. The model has `vocab_size` embeddings, some of which may be no token's."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f'GGUF tokenizer "{kind}" is not supported: only byte-level BPE ("gpt2") is')
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise ModelError("the GGUF file carries no vocabulary or no merges")
    if len(tokens) > vocab_size:
        raise ModelError(f"the GGUF file has {len(tokens)} tokens, but embeddings for {vocab_size}")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if not isinstance(types, list | array) or len(types) != len(tokens):
        raise ModelError("the GGUF file's token types are not one for each of its tokens")
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    settings = _settings(metadata, tokens)
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == CONTROL,
            }
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _pre_tokenizer(pre),
        "post_processor": _post_processor(metadata, tokens),
        "decoder": _BYTES | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in ("llama-bpe", "llama3"),
            "vocab": {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind != UNUSED},
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    return {"tokenizer.json": spec, "tokenizer_config.json": settings}


_BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _pre_tokenizer(pre: str) -> dict[str, Any]:
    def split(pattern: str) -> dict[str, Any]:
        return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}

    first = {
        "default": None,
        "gpt-2": None,
        "smollm": {"type": "Digits", "individual_digits": True},
        "qwen2": split(_QWEN2),
        "llama-bpe": split(_LLAMA3),
        "llama3": split(_LLAMA3),
    }
    if pre not in first:
        raise ModelError(f'GGUF pre-tokenizer "{pre}" is not supported.{nearest(pre, first)}')
    bytes_ = _BYTES | {"use_regex": pre in ("default", "gpt-2", "smollm")}
    return {"type": "Sequence", "pretokenizers": [first[pre], bytes_]} if first[pre] else bytes_


def _post_processor(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if not metadata.get("tokenizer.ggml.add_bos_token", False) or bos is None:
        return None
    special = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            special,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": tokens[bos], "type_id": 1}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}},
    }


def _settings(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for role, name in _ROLES.items():
        if (id := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            if not isinstance(id, int) or not 0 <= id < len(tokens):
                raise ModelError(f"the GGUF file's {name}_token_id {id} is not in its vocabulary")
            settings[f"{role}_token"] = tokens[id]
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if context is not None:
        settings["model_max_length"] = context
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = str(template)
    return settings
