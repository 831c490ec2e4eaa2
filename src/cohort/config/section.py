"""The base class of all sections of settings, with the three kinds of rules that a section can declare.

    warmup: Annotated[int, at_least(0)] = 0          # a bound of one setting
    effects = (Effect(...),)                         # when settings have an effect, and why they otherwise have none
    def check(self, user_settings): ...              # what must hold for several settings together

`cohort.config.rules` goes through all sections of a config and applies the rules.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar


@dataclass(frozen=True, slots=True)
class Bound:
    """A condition on one number. `wording` follows "it must be" in messages; `holds` tests a value."""

    wording: str
    holds: Callable[[Any], bool]


def at_least(low: float) -> Bound:
    """Returns the bound that holds for numbers x >= low, infinity included, and not for NaN."""
    return Bound(f"at least {low}", lambda x: x >= low)


def above(low: float) -> Bound:
    """Returns the bound that holds for numbers x > low, infinity included, and not for NaN."""
    return Bound(f"above {low}", lambda x: x > low)


FINITE = Bound("a finite number", math.isfinite)
ONE_AT_MOST = Bound("from 0 to 1", lambda x: 0 <= x <= 1)

# Types for the fields of sections. The comparisons are False for NaN, but infinity passes them: hence the bound FINITE.
AtLeast0 = Annotated[int, at_least(0)]
AtLeast1 = Annotated[int, at_least(1)]
Finite = Annotated[float, FINITE]
FiniteAtLeast0 = Annotated[float, FINITE, at_least(0)]
FiniteAbove0 = Annotated[float, FINITE, above(0)]
Share = Annotated[float, ONE_AT_MOST]
BelowOne = Annotated[float, Bound("at least 0 and below 1", lambda x: 0 <= x < 1)]


@dataclass(frozen=True, slots=True)
class Effect:
    """The condition under which settings have an effect. A setting that the user gave without effect is an error.

    Names are relative to the section that declares it: `steps` in `ReplayConfig` is the setting `replay.steps`.
    """

    # The settings that have an effect only if `acts(section)` is true.
    settings: tuple[str, ...]
    # The settings that the condition depends on.
    decided_by: tuple[str, ...]
    acts: Callable[[Any], bool]
    # Why there is no effect if the condition is false; after a semicolon what the user can change, if anything.
    reason: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of settings that belong together, such as `optim`. Sections can contain sections."""

    effects: ClassVar[tuple[Effect, ...]] = ()
    # True if the section can be switched off. While it is off, config.yaml has none of its settings.
    optional: ClassVar[bool] = False

    @property
    def is_on(self) -> bool:
        """Whether the feature that this section configures is used at all.

        Always True here; sections that can be switched off override it.
        """
        return True

    def check(self, user_settings: Collection[str]) -> None:
        """Raises a ConfigError if settings of this section contradict each other. This base method checks nothing.

        `user_settings` are the full dotted names of the settings that the user gave, such as `optim.warmup`, for checks
        that concern only these. Sections inside this one are not checked: `rules.validate` calls each.
        """


S = TypeVar("S", bound=Section)


def walk_sections(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """Yields every section inside `section`, at any depth, then `section` itself, as (prefix, section).

    Sections that are off are among them. Inner sections come before the one that contains them.
    The prefix begins the full names of the section's settings and ends with a dot, such as `algo.kl.`. That of the
    outermost section is the argument `prefix`.
    """
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            yield from walk_sections(value, f"{prefix}{field.name}.")
    yield prefix, section


def reset_inactive_sections(section: S) -> S:
    """Returns a copy of `section` in which every section inside it, at any depth, has its defaults if it is off.

    The defaults are those that the enclosing class gives it. `section` itself is not reset. Afterwards two configs are
    equal if they differ only in sections that are off; other settings without effect still count.
    """
    default = None
    changes = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if not isinstance(value, Section):
            continue
        if value.is_on:
            changes[field.name] = reset_inactive_sections(value)
        else:
            # The default of the enclosing class, not of the section: reinforce_pp has its own defaults for kl.
            default = type(section)() if default is None else default
            changes[field.name] = getattr(default, field.name)
    return dataclasses.replace(section, **changes) if changes else section
