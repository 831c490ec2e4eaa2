"""A run: its directory, its steps, its checkpoints and its card."""
