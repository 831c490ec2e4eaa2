"""Texts to token ids for a model that reads texts and writes none, such as one that compares sentences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cohort.errors import ModelError
from cohort.text.folder import read_object
from cohort.text.markup import build_tokenizer

# Of a token, more than enough for any language: what comes after the last token that is read need not be parsed.
_MAX_CHARACTERS = 100


def load_encoder(folder: Path, max_tokens: int) -> Callable[[str], list[int]]:
    """Returns a function from a text to its first `max_tokens` token ids, with the special tokens around a text.

    `folder` has the file tokenizer.json. What it says about padding and cutting is replaced. The function takes any
    text; half characters (lone surrogates) are read as question marks. Raises ModelError for a tokenizer that is
    missing or cannot be used.
    """
    spec = read_object(folder / "tokenizer.json")
    if not spec:
        raise ModelError(f"{folder} has no tokenizer.json; name the folder of a model that has one")
    tokenizer = build_tokenizer(spec)
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)

    def encode(text: str) -> list[int]:
        """Returns the token ids of a text."""
        whole = text[: _MAX_CHARACTERS * max_tokens].encode("utf-8", "replace").decode("utf-8")
        ids: list[int] = tokenizer.encode(whole).ids
        return ids

    return encode
