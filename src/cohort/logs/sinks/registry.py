"""The sinks by name, and checks that they can be used."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import cast

from cohort.errors import ConfigError, suggest_name
from cohort.logs.view import View

# The name of a sink is also the name of its package and of the extra in "pip install cohort[...]".
SINKS = {
    "tensorboard": "TensorboardSink",
    "trackio": "TrackioSink",
    "wandb": "WandbSink",
}


def check_sinks(names: Sequence[str]) -> None:
    """Raises ConfigError for a name that is unknown or given twice, or whose package is not installed.

    Imports none of these packages, so it can run before everything else.
    """
    for name in names:
        if name not in SINKS:
            raise ConfigError(f'unknown sink "{name}".{suggest_name(name, SINKS)} Correct the names in --sinks.')
        if names.count(name) > 1:
            raise ConfigError(f'sink "{name}" is given twice; name it once in --sinks.')
        spec = importlib.util.find_spec(name)
        # Without an origin this is no package, but a folder of that name, for instance the one that wandb writes to.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f'sink "{name}" needs the package {name}, which is not installed. Install it: pip install '
                f'"cohort[{name}]"'
            )


def make_sinks(names: Sequence[str]) -> dict[str, View]:
    """Returns a new sink for each name, by name, not started. Raises ConfigError as `check_sinks` does.

    A program's package is imported only when its sink starts, where a failure ends only the sink.
    """
    check_sinks(names)
    made = {}
    for name in names:
        module = importlib.import_module(f"cohort.logs.sinks.{name}_sink")
        made[name] = cast(View, getattr(module, SINKS[name])())
    return made
