"""Recipes: functions that return a complete config, an `RL`, `SFT` or `DPO`. A variant is derived from another recipe.

A recipe in a user's own file needs no registration: `cohort train path/to/file.py:function`.
"""

from __future__ import annotations

from cohort.recipes import (
    arithmetic,
    calculator,
    code,
    countdown,
    gsm8k,
    ifeval,
    imitation,
    mathematics,
    search_qa,
    smollm2,
    tiny,
)
from cohort.recipes.registry import RECIPES, recipe

__all__ = [
    "RECIPES",
    "arithmetic",
    "calculator",
    "code",
    "countdown",
    "gsm8k",
    "ifeval",
    "imitation",
    "mathematics",
    "recipe",
    "search_qa",
    "smollm2",
    "tiny",
]
