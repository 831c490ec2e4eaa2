"""Tasks: where prompts come from and how answers are scored. See `base` for the contract."""
