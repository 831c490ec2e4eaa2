"""Which settings of a run may change when it is resumed: those that do not decide what is learned."""

from __future__ import annotations

from collections.abc import Sequence

from cohort.config.load import change_config
from cohort.config.schema import RunConfig

MAY_CHANGE = ("steps", "learner.shard", "learner.tensor", "engine", "engine.", "scoring.")
"""Names of settings that may change; with a dot at the end, all of a section."""


def may_change(name: str) -> bool:
    """Returns whether the setting with this full name may change when a run is resumed.

    >>> may_change("learner.shard"), may_change("engine"), may_change("scoring.seconds"), may_change("optim.lr")
    (True, True, True, False)
    """
    return name in MAY_CHANGE or any(name.startswith(part) for part in MAY_CHANGE if part.endswith("."))


def change_settings(config: RunConfig, words: Sequence[str]) -> RunConfig:
    """Returns the config of a run with other values, given as words of a command line. Without words it is unchanged.

    Raises ConfigError for unknown settings and wrong values. The caller has refused settings that may not change.
    """
    return change_config(config, words, is_recorded=True) if words else config
