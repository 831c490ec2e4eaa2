"""Text: tokenizers, chat templates and special tokens, without transformers and torch."""

from cohort.text.tokenizer import RawTextRenderer, RenderedPrompt, TextStream, Tokenizer

__all__ = ["RawTextRenderer", "RenderedPrompt", "TextStream", "Tokenizer"]
