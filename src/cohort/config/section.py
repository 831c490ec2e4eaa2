"""What every class of settings shares: bounds beside its fields, rules beside the class they speak of.

    warmup: Annotated[int, at_least(0)] = 0          # a bound
    effects = (Effect(...),)                         # when a setting acts, and why it otherwise does not
    def check(self, given): ...                      # what must hold together

`cohort.config.rules` walks a config and applies them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar


@dataclass(frozen=True, slots=True)
class Bound:
    """What a number must satisfy: how that is worded, and whether it holds."""

    wanted: str
    holds: Callable[[Any], bool]


def at_least(low: float) -> Bound:
    return Bound(f"at least {low}", lambda x: x >= low)


def above(low: float) -> Bound:
    return Bound(f"above {low}", lambda x: x > low)


FINITE = Bound("a finite number", math.isfinite)
ONE_AT_MOST = Bound("from 0 to 1", lambda x: 0 <= x <= 1)

AtLeast0 = Annotated[int, at_least(0)]
AtLeast1 = Annotated[int, at_least(1)]
Finite = Annotated[float, FINITE]
FiniteAtLeast0 = Annotated[float, FINITE, at_least(0)]
FiniteAbove0 = Annotated[float, FINITE, above(0)]
Share = Annotated[float, ONE_AT_MOST]
BelowOne = Annotated[float, Bound("at least 0 and below 1", lambda x: 0 <= x < 1)]


@dataclass(frozen=True, slots=True)
class Effect:
    """`settings` act only when `acts` holds; `through` are the settings that decide it.

    Names are relative to the section that has the effect: `steps` in `ReplayConfig` is `replay.steps`.
    """

    settings: tuple[str, ...]
    through: tuple[str, ...]
    acts: Callable[[Any], bool]  # of the section
    because: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A class of settings."""

    effects: ClassVar[tuple[Effect, ...]] = ()
    optional: ClassVar[bool] = False  # it can be off, and config.yaml then has none of its settings

    @property
    def on(self) -> bool:
        """Whether what it sets is done at all."""
        return True

    def check(self, given: Collection[str]) -> None:
        """Raise a ConfigError about settings that cannot go together. `given`: those the user wrote, by full name."""


S = TypeVar("S", bound=Section)


def sections(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """Every section inside `section`, then itself, each with the beginning of its settings' names."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            yield from sections(value, f"{prefix}{field.name}.")
    yield prefix, section


def tidied(section: S) -> S:
    """With every part that is off at its default: what does not act makes no difference between two configs."""
    default, changes = None, {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if not isinstance(value, Section):
            continue
        if value.on:
            changes[field.name] = tidied(value)
        else:
            default = type(section)() if default is None else default
            changes[field.name] = getattr(default, field.name)
    return dataclasses.replace(section, **changes) if changes else section
