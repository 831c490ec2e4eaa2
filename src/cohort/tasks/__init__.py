"""Tasks: where prompts come from and how answers are scored. `base` defines what a task must provide."""
