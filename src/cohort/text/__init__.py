"""Text: tokenizers, chat templates and special tokens, without transformers and torch."""

from cohort.text.tokenizer import RawTextRenderer, Rendered, TextStream, Tokenizer

__all__ = ["RawTextRenderer", "Rendered", "TextStream", "Tokenizer"]
