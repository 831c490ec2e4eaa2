"""GGUF files: reading them and converting them to a Hugging Face folder."""
