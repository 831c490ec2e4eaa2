"""Markup kept apart from text: only what the template or the model wrote may become a special token.

The added tokens of a vocabulary ("<|im_end|>", "<tool_call>") are renamed to strings that the text at hand cannot
contain: a *mark*, their number, the mark again. The mark is a private-use character that does not occur in the text.
Where a token is meant, its spelling is replaced by its new name before the text is encoded; everywhere else its
spelling stays ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import tokenizers

from cohort.errors import ModelError, TaskError, shorten_error
from cohort.system.json_text import show_value


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedToken:
    """An entry of added_tokens in tokenizer.json."""

    id: int
    spelling: str
    special: bool  # left out when tokens are decoded to plain text
    single_word: bool = False  # not recognised inside a word


class Markup:
    """The added tokens of a vocabulary: finds their spellings in text and replaces them by names with a mark."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self.tokens = tuple(tokens)
        self._index = {t.spelling: i for i, t in enumerate(self.tokens)}
        longest_first = sorted(self.tokens, key=lambda t: -len(t.spelling))
        self._pattern = re.compile("|".join(map(_make_pattern, longest_first)) or "(?!)")

    def make_token_name(self, index: int, mark: str) -> str:
        """Returns the name that stands for an added token: its position `index` in `tokens`, between two marks."""
        return f"{mark}{index}{mark}"

    def mark_tokens(self, text: str, mark: str, only: Collection[int] | None = None) -> str:
        """Returns the text with the spellings of added tokens, such as "<think>", replaced by their names.

        A name is the number of the token between two `mark` characters; see `make_token_name`. `mark` must not occur in
        the text. `only` are the ids of the tokens that are replaced, the others stay spelled; None = all are replaced.
        """

        def write(match: re.Match[str]) -> str:
            """Returns the name of the token that was found, or its spelling if it is not to be replaced."""
            index = self._index[match[0]]
            return self.make_token_name(index, mark) if only is None or self.tokens[index].id in only else match[0]

        return self._pattern.sub(write, text)

    def restore_spellings(self, text: str, mark: str) -> str:
        """Undoes `mark_tokens`: returns the text with names replaced by the spellings of their tokens.

        Marks that were written as JSON escapes count too. Marks that belong to no name are removed.
        """
        # A template may write non-ASCII characters as JSON escapes.
        text = text.replace(json.dumps(mark)[1:-1], mark)
        text = re.sub(f"{mark}([0-9]+){mark}", lambda m: self.tokens[int(m[1])].spelling, text)
        # A template that cuts text may have separated a mark from its number.
        return text.replace(mark, "")

    def find_ids(self, text: str) -> set[int]:
        """Returns the ids of the added tokens that the tokenizer would find in the text, from left to right.

        A spelling does not count inside a longer one, where it overlaps an earlier one, or inside a word if the token
        must be a word of its own.
        """
        return {self.tokens[self._index[m[0]]].id for m in self._pattern.finditer(text)}


def read_added_tokens(spec: dict[str, Any]) -> list[AddedToken]:
    """Returns the added tokens in `spec`, the content of tokenizer.json, in its order; [] if it has none.

    Tokens of white space alone are left out unless they are special, because they are text. Raises ModelError for an
    entry that lacks an id, a text or whether it is special.
    """
    entries = spec.get("added_tokens") or []
    types = {"id": int, "content": str, "special": bool}
    for t in entries if isinstance(entries, list) else [entries]:
        if not isinstance(t, dict) or any(type(t.get(key)) is not kind for key, kind in types.items()):
            raise ModelError(
                f"the model's tokenizer.json has {show_value(t)} in added_tokens, which must be a list of objects with "
                "id, content and special; replace it by an intact copy, or use another model"
            )
    # Some vocabularies add runs of white space as tokens. These are text and not markup.
    return [
        AddedToken(
            id=t["id"], spelling=t["content"], special=t["special"], single_word=bool(t.get("single_word", False))
        )
        for t in entries
        if t["special"] or t["content"].strip()
    ]


def build_tokenizer(spec: dict[str, Any], names: dict[str, str] | None = None) -> tokenizers.Tokenizer:
    """Returns the tokenizer of `spec`, the content of tokenizer.json. Raises ModelError if it cannot be used.

    `names` are other names for its added tokens; None = their own.
    """
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec if names is None else spec | _rename_tokens(spec, names)))
    except Exception as e:
        raise ModelError(
            f"the package tokenizers {tokenizers.__version__} does not accept the model's tokenizer.json: "
            f"{shorten_error(e)}; upgrade the package (pip install -U tokenizers), or use another model"
        ) from e


def build_renamed_tokenizer(spec: dict[str, Any], markup: Markup, mark: str) -> tokenizers.Tokenizer:
    """Returns the tokenizer of `spec`, the content of tokenizer.json, with its added tokens renamed by `mark`.

    A spelling such as "<think>" is then encoded as ordinary text, and only the name of a token becomes that token. The
    tokenizer adds no special tokens of its own, cuts nothing and pads nothing. `spec` is not changed. Raises ModelError
    if it cannot be used, or if it gives an added token two different ids.
    """
    names = {t.spelling: markup.make_token_name(i, mark) for i, t in enumerate(markup.tokens)}
    tokenizer = build_tokenizer(spec, names)
    for token in markup.tokens:
        if tokenizer.token_to_id(names[token.spelling]) != token.id:
            raise ModelError(
                f'the model\'s tokenizer.json gives "{token.spelling}" the id {token.id} in added_tokens, but another '
                "one in its vocabulary; correct one of the two there, or use another model"
            )
    return tokenizer


def _rename_tokens(spec: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Returns the entries of `spec`, the content of tokenizer.json, that change if its added tokens get these names.

    Texts are neither framed by special tokens nor cut nor padded any more. A malformed `spec` raises any exception.
    """
    model = dict(spec["model"])
    vocab = model.get("vocab", {})
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): id for piece, id in vocab.items()}
    else:
        # A Unigram vocabulary is a list of [piece, score].
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    entries = [
        t | {"content": names[t["content"]], "normalized": False} if t["content"] in names else t
        for t in spec.get("added_tokens") or []
    ]
    return {"model": model, "added_tokens": entries, "post_processor": None, "truncation": None, "padding": None}


def find_unused_characters(count: int, texts: Iterable[str]) -> list[str]:
    """Returns `count` different private-use characters that occur in none of the texts.

    The choice is not random: they are the same ones for all texts without such characters.
    """
    seen = set().union(*texts)
    free = (chr(c) for c in range(0x10FF00, 0x100000, -1) if chr(c) not in seen)
    return [next(free) for _ in range(count)]


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a copy of nested JSON data with `change` applied to every string, except keys of dicts.

    Keys that are no strings become strings, and tuples become lists. Raises TaskError for a value that is not JSON.
    """
    if isinstance(value, str):
        return change(str(value))
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(k): map_strings(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(v, change) for v in value]
    raise TaskError(
        f"a message or tool of the prompt contains a {type(value).__name__}, which is not JSON; use only strings, "
        "numbers, booleans, None, lists and dicts"
    )


def list_strings(value: Any) -> list[str]:
    """Returns all strings in nested JSON data as one list, in order, the keys of dicts included.

    Repeated strings stay repeated. Anything but strings, dicts, lists and tuples is skipped, so None gives [].
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [s for k, v in value.items() for s in [str(k), *list_strings(v)]]
    return [s for v in value for s in list_strings(v)] if isinstance(value, list | tuple) else []


def _make_pattern(token: AddedToken) -> str:
    """Returns the regular expression that finds the spelling of a token.

    A `single_word` token is not found inside a word.
    """
    spelled = re.escape(token.spelling)
    return rf"(?<!\w){spelled}(?!\w)" if token.single_word else spelled
