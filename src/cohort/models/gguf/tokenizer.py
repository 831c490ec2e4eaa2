"""Reconstruction of tokenizer.json and tokenizer_config.json from the vocabulary in GGUF metadata."""

from __future__ import annotations

from array import array
from typing import Any

from cohort.errors import ModelError

# Token types of GGUF.
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
# GGUF's name of a special token by its name in tokenizer_config.json.
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Patterns that cut text into pieces before merging, named as in llama.cpp.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def make_tokenizer_files(metadata: dict[str, Any], vocab_size: int) -> dict[str, dict[str, Any]]:
    """Returns the contents of tokenizer.json and tokenizer_config.json, by file name, from the metadata of a GGUF file.

    `vocab_size`, the number of embeddings, is only a check: there must not be more tokens. Raises ModelError for
    tokenizers that are incomplete, inconsistent or not supported: only byte-level BPE ("gpt2") is.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f'GGUF tokenizer "{kind}" is not supported, only "gpt2" is: use the safetensors version of the model '
            "(cohort pull OWNER/NAME)"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise ModelError("the GGUF file has no vocabulary or no merges: choose a GGUF file with the whole tokenizer")
    if len(tokens) > vocab_size:
        raise ModelError(
            f"the GGUF file has {len(tokens)} tokens, but embeddings for only {vocab_size}: it is damaged, download it "
            "again or choose another file"
        )
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if not isinstance(types, list | array) or len(types) != len(tokens):
        raise ModelError(
            "the GGUF file does not have exactly one token type per token: it is damaged, download it again or choose "
            "another file"
        )
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    settings = _make_tokenizer_config(metadata, tokens)
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
            # Tokens that are matched as a whole in the text, before BPE.
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _make_pre_tokenizer(pre),
        "post_processor": _make_post_processor(metadata, tokens),
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


def _make_pre_tokenizer(pre: str) -> dict[str, Any]:
    """Returns the section "pre_tokenizer" of tokenizer.json, which cuts text into pieces before BPE.

    `pre` is llama.cpp's name of it, such as "qwen2". Raises ModelError for unknown names.
    """

    def split(pattern: str) -> dict[str, Any]:
        """Returns a step that cuts text at the matches of a pattern and keeps them."""
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
        valid = ", ".join(sorted(first))
        raise ModelError(
            f'GGUF pre-tokenizer "{pre}" is not supported, only these: {valid}. Use the safetensors version of the '
            "model (cohort pull OWNER/NAME)"
        )
    # Only the first three use the built-in pattern of GPT-2; the others have cut the text already.
    bytes_ = _BYTES | {"use_regex": pre in ("default", "gpt-2", "smollm")}
    return {"type": "Sequence", "pretokenizers": [first[pre], bytes_]} if first[pre] else bytes_


def _make_post_processor(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """Returns the section "post_processor" of tokenizer.json, which puts the token BOS in front of every text.

    `tokens` are the texts of all tokens. Returns None if the metadata do not ask for BOS or name no such token.
    """
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


def _make_tokenizer_config(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Returns the contents of tokenizer_config.json: special tokens, context length and chat template.

    What the metadata lack is left out. `tokens` are the texts of all tokens. Raises ModelError if the id of a special
    token is not among them.
    """
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for role, name in _ROLES.items():
        if (id := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            if not isinstance(id, int) or not 0 <= id < len(tokens):
                raise ModelError(
                    f"the GGUF file's {name}_token_id {id} is not in its vocabulary: it is damaged, download it again "
                    "or choose another file"
                )
            settings[f"{role}_token"] = tokens[id]
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if context is not None:
        settings["model_max_length"] = context
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = str(template)
    return settings
