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

from cohort.system.process import shorten_thread_spinning

# Before torch is imported, by Cohort or by the caller: the library of its threads reads the setting once.
shorten_thread_spinning()

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cohort.config.algos import Policy as Policy
    from cohort.config.algos import algorithm as algorithm
    from cohort.config.imitation import DPO as DPO
    from cohort.config.imitation import SFT as SFT
    from cohort.config.kinds import RL as RL
    from cohort.config.schema import RunConfig as RunConfig
    from cohort.examples.mapped import Preference as Preference
    from cohort.examples.rows import Conversation as Conversation
    from cohort.jobs.rl import RLJob as RLJob
    from cohort.judge.judge import Judge as Judge
    from cohort.loops.rl import update_policy as update_policy
    from cohort.recipes import recipe as recipe
    from cohort.tasks.base import Verdict as Verdict
    from cohort.tasks.base import task as task
    from cohort.tasks.environment import Opening as Opening
    from cohort.tasks.environment import Step as Step

# Public names and the modules that define them. They are imported when they are first used.
_LAZY = {
    "Conversation": "cohort.examples.rows",
    "DPO": "cohort.config.imitation",
    "Judge": "cohort.judge.judge",
    "Opening": "cohort.tasks.environment",
    "Policy": "cohort.config.algos",
    "Preference": "cohort.examples.mapped",
    "RL": "cohort.config.kinds",
    "RLJob": "cohort.jobs.rl",
    "RunConfig": "cohort.config.schema",
    "SFT": "cohort.config.imitation",
    "Step": "cohort.tasks.environment",
    "Verdict": "cohort.tasks.base",
    "algorithm": "cohort.config.algos",
    "recipe": "cohort.recipes",
    "task": "cohort.tasks.base",
    "update_policy": "cohort.loops.rl",
}


def train(
    recipe: str | RunConfig,
    settings: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    out: str | Path = "runs",
    log: str = "plain",
    sinks: Sequence[str] = (),
) -> Path:
    """Trains a recipe to its last step, in a new run directory, and returns the path of that directory.

    `recipe` is a name, `file.py:function`, the path of a run's config.yaml, or a config such as `RL(...)`. `settings`
    maps dotted names of settings, such as "optim.lr", to values that replace those of the recipe. `name` is that of the
    run directory; None = date, recipe and four random characters. `out` is the folder in which it is made. `log` is
    the progress view ("live", "plain", "json" or "auto"). `sinks` are programs that get the metrics too (wandb,
    tensorboard, trackio). Raises ConfigError for wrong settings, and for a name that is in use. A signal that stops the
    run saves a checkpoint and raises KeyboardInterrupt.

    Import cohort before torch: a step is then as fast as on the command line, also on a busy machine. `import cohort`
    tells the library of torch's threads, by environment variables that it reads once, to wait without keeping the
    processors busy. If torch is there first, Cohort starts idle threads with the same effect, and a step on a quiet
    machine may be a little slower.
    """
    config = _load_config(recipe, settings)
    if name is not None:
        from cohort.run.finding import require_new_name

        require_new_name(Path(out), name)
    # Imported here because it imports torch: wrong settings must not wait for that.
    from cohort.jobs.build import train as build_train

    return build_train(config, Path(out), log, *sinks, name=name)


def resume(run: str | Path, *, steps: int | None = None, log: str = "plain", sinks: Sequence[str] = ()) -> Path:
    """Continues a run from its newest checkpoint to its last step, and returns its path.

    `run` is its directory, its name or a part of the name that no other run in the folder runs has. `steps` is
    a new, larger number of steps; None keeps the run's number. `log`, `sinks` and signals are as in `train`. Raises
    RunError if there is no such run, or another process writes it.
    """
    _check_process()
    from cohort.jobs.build import resume as build_resume
    from cohort.run.finding import find_run

    return build_resume(find_run(run), steps, log, *sinks)


def build(recipe: str | RunConfig, settings: Mapping[str, Any] | None = None) -> RLJob:
    """Loads the model and the task of a recipe and returns everything that trains it, for a loop of your own.

    The parameters are those of `train`. The result has `producer`, `engine`, `learner`, `algo`, `sync` and `tokenizer`;
    `with cohort.build(...) as job:` ends its worker processes. It writes no files. Raises ConfigError for wrong
    settings, and for a recipe that is not of reinforcement learning.
    """
    config = _load_config(recipe, settings)
    from cohort.config.kinds import RL
    from cohort.errors import ConfigError
    from cohort.jobs.build import build_rl_job

    if not isinstance(config, RL):
        raise ConfigError(
            f"cohort.build needs a recipe of reinforcement learning (cohort.RL), and {config.recipe or 'this one'} is "
            f"a {type(config).__name__}. Use cohort.train for it."
        )
    return build_rl_job(config)


def _load_config(recipe: str | RunConfig, settings: Mapping[str, Any] | None) -> RunConfig:
    """Returns the config of a recipe with the settings of the caller, checked."""
    _check_process()
    from cohort.config import load
    from cohort.config.schema import RunConfig
    from cohort.errors import ConfigError

    given = {} if settings is None else settings
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'settings must be a dict such as {{"steps": 50}}, not a {type(given).__name__}. Correct the second '
            "argument."
        )
    if not isinstance(recipe, str | RunConfig):
        raise ConfigError(
            f"a recipe must be a name, file.py:function, or a config such as cohort.RL(...), not a "
            f"{type(recipe).__name__}. Correct the first argument."
        )
    return load.load_config(recipe, (), given) if isinstance(recipe, str) else load.change_config(recipe, (), given)


def _check_process() -> None:
    """Raises ConfigError where nothing can be trained, that is on Windows.

    It comes before all imports of modules that need Unix.
    """
    from cohort.system import process

    process.require_unix()
    process.keep_freed_memory()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'cohort' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
