"""A judge: a language model behind an OpenAI-compatible server that grades answers."""
