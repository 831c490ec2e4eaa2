"""Recipes: functions that return a complete config of a kind, `RL` or `SFT`. A variant derives from another recipe.

A recipe in a file of your own needs no registration: `cohort train path/to/file.py:function`.
"""

from __future__ import annotations

from cohort.recipes import arithmetic, countdown, gsm8k, ifeval, mathematics, smollm2, tiny
from cohort.recipes.registry import RECIPES, recipe

__all__ = ["RECIPES", "arithmetic", "countdown", "gsm8k", "ifeval", "mathematics", "recipe", "smollm2", "tiny"]
