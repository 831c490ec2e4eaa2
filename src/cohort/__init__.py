"""Cohort teaches language models by reinforcement learning with verifiable rewards.

    import cohort
    cohort.train("quickstart", {"steps": 50, "optim.lr": 1e-4})

Importing this package is cheap: torch is imported when something is trained, sampled or loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cohort.config.kinds import RL as RL
    from cohort.config.kinds import SFT as SFT
    from cohort.config.schema import RunConfig as RunConfig
    from cohort.recipes import recipe as recipe
    from cohort.tasks.base import Verdict as Verdict
    from cohort.tasks.base import task as task

# Public names and the modules that define them. They are imported when they are first used.
_LAZY = {
    "RL": "cohort.config.kinds",
    "RunConfig": "cohort.config.schema",
    "SFT": "cohort.config.kinds",
    "Verdict": "cohort.tasks.base",
    "recipe": "cohort.recipes",
    "task": "cohort.tasks.base",
}


def train(
    recipe: str | RunConfig,
    settings: Mapping[str, Any] | None = None,
    *,
    out: str | Path = "runs",
    log: str = "plain",
    sinks: Sequence[str] = (),
) -> Path:
    """Trains a recipe to its last step, in a new run directory, and returns the path of that directory.

    `recipe` is a name, `file.py:function`, or a config such as `RL(...)`. `settings` maps dotted names of settings,
    such as "optim.lr", to values that replace those of the recipe. `out` is the folder in which the run directory is
    made. `log` is the progress view ("live", "plain", "json" or "auto"). `sinks` are programs that get the metrics too
    (wandb, tensorboard, trackio). Raises ConfigError for wrong settings. A signal that stops the run saves a checkpoint
    and raises KeyboardInterrupt.
    """
    from cohort.config import load
    from cohort.jobs.build import train as build_train
    from cohort.system import process

    process.require_one_process()
    args = load.format_args(settings or {})
    config = load.load_config(recipe, args) if isinstance(recipe, str) else load.change_config(recipe, args)
    return build_train(config, Path(out), log, *sinks)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'cohort' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
