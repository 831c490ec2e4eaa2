"""Reading of GGUF files and their conversion to Hugging Face folders."""
