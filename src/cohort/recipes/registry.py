"""The table of built-in recipes by name, to which plugins add theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cohort.config.schema import RunConfig
from cohort.errors import ConfigError
from cohort.registry import Registry

Recipe = Callable[[], RunConfig]
C = TypeVar("C", bound=RunConfig)

RECIPES: Registry[Recipe] = Registry("recipe")


def recipe(function: Callable[[], C]) -> Callable[[], C]:
    """Registers `function` as the recipe of its name and returns it unchanged; used as a decorator.

    The first line of its docstring describes it in the help. The function is not called. Raises ConfigError if it has
    no docstring, or if another module has registered the name; the same module may replace its own recipe.
    """
    name = getattr(function, "__name__", repr(function))
    if not (function.__doc__ or "").strip():
        raise ConfigError(
            f"recipe {name} has no docstring; write one in its function, for `cohort train --help` to show."
        )
    known = RECIPES.get(name)
    if known is not None and known.__module__ != function.__module__:
        raise ConfigError(f"recipe {name} is already registered by the module {known.__module__}; rename the function.")
    RECIPES[name] = function
    return function
