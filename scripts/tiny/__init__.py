"""How the bundled `tiny` model is made: traces, tokenizer, training."""
