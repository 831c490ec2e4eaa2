"""Text: tokenizer, chat template, special tokens."""

from cohort.text.tokenizer import RawText, Rendered, TextStream, Tokenizer

__all__ = ["RawText", "Rendered", "TextStream", "Tokenizer"]
