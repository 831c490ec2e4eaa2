"""Checks of a run before it starts: the update, the reward and the plan, on its own config and a few real prompts."""
