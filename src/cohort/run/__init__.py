"""The life of a run: its directory, its steps, its checkpoints, its card."""
