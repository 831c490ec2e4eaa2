"""Text: tokenizers, chat templates and special tokens, without transformers and torch."""

from cohort.text.framing import PromptRenderer
from cohort.text.tokenizer import RawTextRenderer, RenderedPrompt, TextStream, Tokenizer

__all__ = ["PromptRenderer", "RawTextRenderer", "RenderedPrompt", "TextStream", "Tokenizer"]
