"""Validation of a config before anything is built from it. The bounds and rules themselves are in the sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from cohort.config.flags import Setting, collect_settings, format_flag
from cohort.config.schema import RunConfig
from cohort.config.section import Bound, Section, walk_sections
from cohort.errors import ConfigError


def validate(config: RunConfig, user_settings: Collection[str] = (), *, is_recorded: bool = False) -> None:
    """Raises a ConfigError that names the first setting that is out of range, contradicts others or has no effect.

    Also if the config lacks something, such as the task. `user_settings` are the full names of the settings that the
    user gave. A setting without effect is an error if the user gave it, or if the recipe changed it from its default.
    The second does not count if the user gave a setting that decides about the effect: `--algo.kl.weight 0` on a recipe
    with KL leaves its other KL settings without effect. Nor does it count in a config that a run recorded
    (`is_recorded`): that was checked together with the flags that the run was started with.
    """
    check_values(config, user_settings)
    _check_effects(config, user_settings, {} if is_recorded else _collect_defaults(config))


def check_values(config: RunConfig, user_settings: Collection[str] = ()) -> None:
    """Raises a ConfigError that names the first setting that is out of range or contradicts others.

    Also if the config lacks something, such as the task. Unlike `validate` it accepts settings without effect, which
    the config of a run may have.
    """
    config.require_complete()
    # Bounds first: the checks of sections may rely on them.
    if broken := find_broken_bound(config):
        setting, bound = broken
        raise ConfigError(
            f"{setting.name} is {setting.value}; it must be {bound.wording}. Correct or remove "
            f"{format_flag(setting.name)}, or the value in the recipe."
        )
    for _, section in walk_sections(config):
        section.check(user_settings)


def find_broken_bound(record: Any) -> tuple[Setting, Bound] | None:
    """Returns the first setting of a dataclass instance that is out of range, with its bound; None if there is none."""
    for setting in collect_settings(record).values():
        for bound in setting.bounds:
            # None stands for an option that is not given.
            if setting.value is not None and not bound.holds(setting.value):
                return setting, bound
    return None


def check_option_bounds(options: Any) -> None:
    """Raises a ConfigError that names the first option of a command that is out of range."""
    if broken := find_broken_bound(options):
        setting, bound = broken
        raise ConfigError(
            f"{format_flag(setting.name)} is {setting.value}; it must be {bound.wording}. Correct or remove it."
        )


def _check_effects(config: RunConfig, user_settings: Collection[str], defaults: Mapping[str, Any]) -> None:
    """Raises a ConfigError for the first setting that has no effect although the user gave it or the recipe changed it.

    `user_settings` are the full names of the settings that the user gave. A change by the recipe is a value other than
    the one in `defaults`. It is no error if the user gave a setting on which the effect depends.
    """
    values = {name: setting.value for name, setting in collect_settings(config).items()}
    for prefix, section in walk_sections(config):
        for effect in section.effects:
            if effect.acts(section):
                continue
            decided_by_user = any(prefix + name in user_settings for name in effect.decided_by)
            for name in (prefix + setting for setting in effect.settings):
                changed_by_recipe = name in defaults and values.get(name) != defaults[name] and not decided_by_user
                # An effect may name settings that the chosen variant does not have, such as algo.clip_low.
                if name in values and (name in user_settings or changed_by_recipe):
                    flag = format_flag(name)
                    cause, _, change = effect.reason.partition("; ")
                    alternative = f", or {change}" if change else ""
                    raise ConfigError(
                        f"{flag} has no effect: {cause}. Remove it from the command or the recipe{alternative}."
                    )


def _collect_defaults(config: RunConfig) -> dict[str, Any]:
    """Returns the default of every setting in the sections of `config`, by full name such as `optim.lr`.

    Where a class was chosen by name, such as the algorithm, the defaults are those of the chosen class. Settings
    outside of sections, such as `steps`, are left out.
    """
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Section):
            settings = collect_settings(type(value)(), f"{field.name}.")
            defaults |= {name: setting.value for name, setting in settings.items()}
    return defaults
