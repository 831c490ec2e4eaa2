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
from datetime import date
from typing import Annotated, Any, ClassVar, TypeVar


@dataclass(frozen=True, slots=True)
class Bound:
    """A condition on one value. `wording` follows "it must be" in messages; `holds` tests a value."""

    wording: str
    holds: Callable[[Any], bool]


def at_least(low: float) -> Bound:
    """Returns the bound that holds for numbers x >= low, infinity included, and not for NaN."""
    return Bound(f"at least {low}", lambda x: x >= low)


def above(low: float) -> Bound:
    """Returns the bound that holds for numbers x > low, infinity included, and not for NaN."""
    return Bound(f"above {low}", lambda x: x > low)


def at_most(high: float) -> Bound:
    """Returns the bound that holds for numbers x <= high, and not for NaN."""
    return Bound(f"at most {high:,}", lambda x: x <= high)


def _is_finite(x: float) -> bool:
    """Returns whether a number is finite as a float: whole numbers of more than 308 digits are not."""
    try:
        return math.isfinite(x)
    except OverflowError:
        return False


def _is_whole_text(text: str) -> bool:
    """Returns whether a text has no half characters (lone surrogates), as bytes that are no UTF-8 become."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _is_date(text: str) -> bool:
    """Returns whether a text is a date like 2026-01-31, or empty."""
    try:
        return text == "" or date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


FINITE = Bound("a finite number", _is_finite)
ONE_AT_MOST = Bound("from 0 to 1", lambda x: 0 <= x <= 1)

# The largest count and the largest number that a setting can have, if it has no bound of its own. Larger ones would
# overflow the 32-bit numbers of torch and the operating system, far from the setting that caused it.
MOST = 1_000_000_000
LARGEST = 1_000_000
# The smallest number above 0 where 0 itself has no meaning: its reciprocal is no larger than LARGEST.
SMALLEST = 1e-6


def is_template(text: str) -> bool:
    """Returns whether a text can be the setting `template`: chat, text, or the path of a Jinja file."""
    return text in ("chat", "text") or text.endswith((".jinja", ".jinja2", ".j2"))


# Types for the fields of sections. The comparisons are False for NaN.
AtLeast0 = Annotated[int, at_least(0), at_most(MOST)]
AtLeast1 = Annotated[int, at_least(1), at_most(MOST)]
Finite = Annotated[float, FINITE, at_least(-LARGEST), at_most(LARGEST)]
FiniteAtLeast0 = Annotated[float, FINITE, at_least(0), at_most(LARGEST)]
FiniteAbove0 = Annotated[float, FINITE, above(0), at_least(SMALLEST), at_most(LARGEST)]
MAX_BATCH = 10_000_000  # samples in a batch
Slots = Annotated[int, at_least(1), at_most(65_536)]
Samples = Annotated[int, at_least(1), at_most(100_000)]
Seed = Annotated[int, at_least(0), at_most(2**63 - 1)]
Threads = Annotated[int, at_least(0), at_most(4_096)]
TopK = Annotated[int, at_least(0), at_most(10_000_000)]
TopP = Annotated[float, Bound("above 0 and at most 1", lambda x: 0 < x <= 1), at_least(SMALLEST)]
# At lower temperatures the logits overflow; 0 means the most probable token where it is allowed.
Temperature = Annotated[float, FINITE, above(0), at_least(0.001), at_most(100)]
TemperatureOr0 = Annotated[
    float, FINITE, at_least(0), Bound("0, or at least 0.001", lambda x: x == 0 or x >= 0.001), at_most(100)
]
Share = Annotated[float, ONE_AT_MOST]
InnerShare = Annotated[float, Bound("above 0 and below 1", lambda x: 0 < x < 1)]
Template = Annotated[str, Bound("chat, text, or a file that ends in .jinja", is_template)]
Text = Annotated[str, Bound("text in UTF-8", _is_whole_text)]
Date = Annotated[str, Bound("a date like 2026-01-31, or empty", _is_date)]
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

    @property
    def off_settings(self) -> frozenset[str]:
        """Names of settings of this section that belong to something that is off. config.yaml does not have them.

        Empty here. Those of a section that can be switched off as a whole need not be named.
        """
        return frozenset()

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
