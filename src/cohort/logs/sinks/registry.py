"""The sinks by name, and the refusal of those that cannot work."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import cast

from cohort.errors import ConfigError, nearest
from cohort.logs.view import View

# A sink's name is also that of its package and of Cohort's extra.
SINKS = {
    "tensorboard": "TensorboardSink",
    "trackio": "TrackioSink",
    "wandb": "WandbSink",
}


def check_sinks(names: Sequence[str]) -> None:
    """Refuse what is unknown, given twice or not installed. Imports nothing, so it can come before everything."""
    for name in names:
        if name not in SINKS:
            raise ConfigError(f'unknown sink "{name}".{nearest(name, SINKS)}')
        if names.count(name) > 1:
            raise ConfigError(f'sink "{name}" is given twice; give it once.')
        spec = importlib.util.find_spec(name)
        # Without an origin it is no package but some folder of that name, such as the one wandb writes to.
        if spec is None or spec.origin is None:
            raise ConfigError(f'sink "{name}" needs the package {name}: pip install "cohort[{name}]"')


def make_sinks(names: Sequence[str]) -> dict[str, View]:
    """The sinks, not started: a package is imported when its sink starts, where a failure costs only the sink."""
    check_sinks(names)
    made = {}
    for name in names:
        module = importlib.import_module(f"cohort.logs.sinks.{name}_sink")
        made[name] = cast(View, getattr(module, SINKS[name])())
    return made
