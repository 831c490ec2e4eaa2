"""Keeping markup apart from text: only what the template or the model wrote may become a special token.

The vocabulary's added tokens ("<|im_end|>", "<tool_call>") are renamed to strings nobody can write: a
private-use character, a number, the character again. Text is then searched for the tokens' spelling exactly
where they are meant, and nowhere else. Which character: one that the text at hand does not contain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import tokenizers

from cohort.errors import ModelError, TaskError


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedToken:
    """An entry of tokenizer.json's added_tokens."""

    id: int
    spelling: str
    special: bool
    single_word: bool = False


class Markup:
    """Finds the added tokens in text, and writes each as a number between two `mark` characters."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self.tokens = tuple(tokens)
        self._index = {t.spelling: i for i, t in enumerate(self.tokens)}
        longest_first = sorted(self.tokens, key=lambda t: -len(t.spelling))
        self._pattern = re.compile("|".join(map(_pattern, longest_first)) or "(?!)")

    def written(self, index: int, mark: str) -> str:
        return f"{mark}{index}{mark}"

    def replace(self, text: str, mark: str, only: Collection[int] | None = None) -> str:
        """Write the added tokens in `text` (those whose id is in `only`) with `mark`."""

        def write(match: re.Match[str]) -> str:
            index = self._index[match[0]]
            return self.written(index, mark) if only is None or self.tokens[index].id in only else match[0]

        return self._pattern.sub(write, text)

    def restore(self, text: str, mark: str) -> str:
        """The spelling again; a mark that a template tore from its number is dropped."""
        text = text.replace(json.dumps(mark)[1:-1], mark)  # a template may escape non-ASCII
        text = re.sub(f"{mark}([0-9]+){mark}", lambda m: self.tokens[int(m[1])].spelling, text)
        return text.replace(mark, "")

    def ids(self, text: str) -> set[int]:
        """Ids of the added tokens spelled in `text`."""
        return {self.tokens[self._index[m[0]]].id for m in self._pattern.finditer(text)}


def added_tokens(spec: dict[str, Any]) -> list[AddedToken]:
    """Those of tokenizer.json that are markup. Runs of white space that some vocabularies add are text."""
    return [
        AddedToken(id=t["id"], spelling=t["content"], special=t["special"], single_word=t.get("single_word", False))
        for t in spec.get("added_tokens") or []
        if t["special"] or t["content"].strip()
    ]


def renamed(spec: dict[str, Any], markup: Markup, mark: str) -> tokenizers.Tokenizer:
    """The tokenizer of `spec` whose added tokens are spelled with `mark`: no text without it can make one."""
    names = {t.spelling: markup.written(i, mark) for i, t in enumerate(markup.tokens)}
    model = dict(spec["model"])
    vocab = model.get("vocab", {})
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): id for piece, id in vocab.items()}
    else:  # Unigram: [[piece, score], ...]
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    entries = [
        t | {"content": names[t["content"]], "normalized": False} if t["content"] in names else t
        for t in spec.get("added_tokens") or []
    ]
    changed = {
        "model": model,
        "added_tokens": entries,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    try:
        made = tokenizers.Tokenizer.from_str(json.dumps(spec | changed))
    except Exception as e:
        raise ModelError(f"tokenizer.json cannot be used: {e}") from e
    for token in markup.tokens:
        if made.token_to_id(names[token.spelling]) != token.id:
            raise ModelError(
                f'tokenizer.json gives "{token.spelling}" the id {token.id}, but its vocabulary has another'
            )
    return made


def unused(count: int, texts: Iterable[str]) -> list[str]:
    """Private-use characters that occur in none of the texts."""
    seen = set().union(*texts)
    free = (chr(c) for c in range(0x10FF00, 0x100000, -1) if chr(c) not in seen)
    return [next(free) for _ in range(count)]


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Plain data with every string changed; keys stay. What is not JSON has no place in a message."""
    if isinstance(value, str):
        return change(str(value))
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(k): mapped(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(v, change) for v in value]
    raise TaskError(f"a message or tool holds a {type(value).__name__}: only JSON values can be rendered")


def strings(value: Any) -> list[str]:
    """Every string in plain data, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [s for k, v in value.items() for s in [str(k), *strings(v)]]
    return [s for v in value for s in strings(v)] if isinstance(value, list | tuple) else []


def _pattern(token: AddedToken) -> str:
    spelled = re.escape(token.spelling)
    return rf"(?<!\w){spelled}(?!\w)" if token.single_word else spelled
