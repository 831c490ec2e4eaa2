"""The text of the tokens of a recorded step, as the run's tokenizer spells them."""

from __future__ import annotations

from cohort.inspect.explain.records import ShownToken
from cohort.text import TextStream, Tokenizer
from cohort.types import Group, Sample

_NUM_CONTEXT_TOKENS = 8  # prompt tokens that are decoded before a completion


def show_prompt(tokenizer: Tokenizer | None, group: Group) -> list[ShownToken]:
    """Returns the tokens of a group's prompt with their text. Without a tokenizer they are shown as ids."""
    prompt = group.prompt
    texts = _decode_tokens(_make_stream(tokenizer), prompt.tokens)
    rows = zip(texts, prompt.tokens, prompt.provenance, strict=True)
    return [ShownToken(text=text, id=id, provenance=p) for text, id, p in rows]


def decode_sample(tokenizer: Tokenizer | None, group: Group, sample: Sample) -> list[str]:
    """Returns the text that each token of a sample adds after the prompt of its group."""
    stream = _make_stream(tokenizer)
    # The end of the prompt goes through the stream first, because the text of the first token depends on it: a space in
    # front of a word, for instance.
    _decode_tokens(stream, group.prompt.tokens[-_NUM_CONTEXT_TOKENS:])
    return _decode_tokens(stream, sample.tokens)


def _make_stream(tokenizer: Tokenizer | None) -> TextStream | None:
    """Returns a stream that spells special tokens too; None without a tokenizer."""
    return TextStream(tokenizer, skip_special=False) if tokenizer else None


def _decode_tokens(stream: TextStream | None, tokens: list[int]) -> list[str]:
    """Returns the text that each token adds when it is pushed into `stream`, which changes.

    A token that completes no character is shown as its id in ⟨⟩; so are all tokens if `stream` is None (no tokenizer).
    """
    return [(stream.push([id]) if stream else "") or f"⟨{id}⟩" for id in tokens]
