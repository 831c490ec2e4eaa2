"""What a config must satisfy before anything is built: walks its sections, which hold the bounds and rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from cohort.config.flags import leaves, show
from cohort.config.schema import RunConfig
from cohort.config.section import Section, sections
from cohort.errors import ConfigError


def validate(config: RunConfig, given: Collection[str] = ()) -> None:
    """Raise a ConfigError naming the first setting that is out of range, impossible or without effect.

    `given` are the settings the user wrote. A setting counts as written, too, when a recipe moved it from its
    default, unless the user then changed what decides whether it acts (`--algo.kl 0` on a recipe with KL).
    """
    config.require_complete()
    for name, leaf in leaves(config).items():
        for bound in leaf.bounds:
            if not bound.holds(leaf.value):
                raise ConfigError(f"{name} is {leaf.value}; it must be {bound.wanted}.")
    for _, section in sections(config):
        section.check(given)
    _check_effects(config, given)


def _check_effects(config: RunConfig, given: Collection[str]) -> None:
    values = {name: leaf.value for name, leaf in leaves(config).items()}
    defaults = _defaults(config)
    for prefix, section in sections(config):
        for effect in section.effects:
            if effect.acts(section):
                continue
            decided = any(prefix + name in given for name in effect.through)
            for name in (prefix + setting for setting in effect.settings):
                moved = name in defaults and values.get(name) != defaults[name] and not decided
                if name in values and (name in given or moved):
                    raise ConfigError(f"{show(name)} has no effect: {effect.because}, or drop it.")


def _defaults(config: RunConfig) -> dict[str, Any]:
    """Default of every setting of the sections, by dotted name."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Section):
            found |= {name: leaf.value for name, leaf in leaves(type(value)(), f"{field.name}.").items()}
    return found
