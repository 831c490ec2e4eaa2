"""Rollouts: prompts become scored groups (see `producer`). Engines are used only through their protocol."""
