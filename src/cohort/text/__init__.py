"""Text: tokenizer, chat template, special tokens."""

from cohort.text.tokenizer import Rendered, TextStream, Tokenizer

__all__ = ["Rendered", "TextStream", "Tokenizer"]
