"""The recipes that the tests can call. Those that need a package beyond `cohort[dev]` are tested in tests/peers."""

from __future__ import annotations

from cohort.recipes import RECIPES

NEED_A_PACKAGE = {"tiny_reasoning_gym"}  # tests/peers/test_reasoning_gym.py
CALLABLE = {name: recipe for name, recipe in RECIPES.items() if name not in NEED_A_PACKAGE}
