"""The table of built-in recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cohort.config.schema import RunConfig
from cohort.errors import ConfigError

Recipe = Callable[[], RunConfig]
C = TypeVar("C", bound=RunConfig)

RECIPES: dict[str, Recipe] = {}


def recipe(function: Callable[[], C]) -> Callable[[], C]:
    """Register `function` under its own name; the first line of its docstring is its description."""
    name = getattr(function, "__name__", repr(function))
    if not (function.__doc__ or "").strip():
        raise ConfigError(f"recipe {name} has no docstring; its first line is what `cohort train --help` shows.")
    known = RECIPES.get(name)
    if known is not None and known.__module__ != function.__module__:
        raise ConfigError(f"recipe {name} is already registered by {known.__module__}; choose another name.")
    RECIPES[name] = function
    return function
