"""`cohort resume RUN [--steps N] [--log live|plain|json] [--sinks NAME,...]`: continues a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from cohort.cli.arguments import read_arguments
from cohort.cli.output import Log, choose_log, parse_sink_names
from cohort.cli.ranks import Ranks, start_ranks
from cohort.cli.sweep import continue_sweep
from cohort.config import flags
from cohort.config.kinds import KINDS
from cohort.config.resuming import may_change
from cohort.config.section import MOST, at_least, at_most
from cohort.errors import ConfigError
from cohort.ranks.environment import is_following_rank
from cohort.run.finding import find_run, is_sweep, require_run
from cohort.sweep.directory import SweepDirectory, find_sweep
from cohort.sweep.plan import check_recipe


@dataclass(frozen=True, kw_only=True)
class Options:
    """What may change in a resumed run. All other settings come from its config.yaml."""

    steps: Annotated[int | None, at_most(MOST)] = None
    """Extend the run: train up to this step; None = as configured."""
    log: Log | None = None
    """How progress is shown; None = live on a terminal, plain elsewhere."""
    sinks: str | None = None
    """Send metrics to these too, separated by commas: wandb, tensorboard, trackio. Not stored with the run."""
    ranks: Ranks = None
    """Processes on this machine that train together; 0 = one per GPU. It may differ from the number before."""
    jobs: Annotated[int | None, at_least(1), at_most(256)] = None
    """Of a sweep: runs at once; None = one. Each keeps the number of threads that the sweep began with."""


def run(args: list[str]) -> None:
    """Runs `cohort resume` with `args`, the words after it: continues a run until its last step.

    Raises ConfigError for flags that would change another setting than the number of steps.
    """
    words, given = flags.split_args(args)
    settings = {field.name for kind in KINDS.values() for field in fields(kind)} - {"steps"}
    changed = [flag for flag in given if flag.name.partition(".")[0] in settings]
    # A flag that would change a setting of the run gets an error of its own, not just "unknown flag".
    for flag in changed:
        if not may_change(flag.name):
            raise ConfigError(
                f"{flag.spelling} cannot change: a run keeps its settings, only --steps may grow, and --engine, "
                "--learner.shard, --learner.tensor and --scoring.x may change. Remove it, or start a new run with it: "
                "cohort train RECIPE --flags."
            )
    changes = [word for flag in changed for word in flag.to_words()]
    others = [word for flag in given if flag not in changed for word in flag.to_words()]
    about = (
        "Continue a run, or a sweep, exactly where it stopped. --engine, --learner.shard, --learner.tensor and "
        "--scoring.x may be given other values than before."
    )
    (where,), options = read_arguments("resume", ["RUN"], about, Options(), [*words, *others])
    path = find_sweep(where) or find_run(where, or_sweep=True)
    if is_sweep(path):
        _resume_sweep(path, options)
        return
    if options.jobs is not None:
        raise ConfigError(f"--jobs has no effect: {where} is no sweep. Remove it.")
    if options.steps is not None and options.steps < 1:
        raise ConfigError(
            f"--steps is {options.steps}; it must be at least 1: the number of the step at which the run ends. "
            "Correct it, or remove it to keep the run's own number."
        )
    sinks = parse_sink_names(options.sinks)
    # Of several ranks only the first needs the run directory.
    if not is_following_rank():
        require_run(path)
    if options.ranks is not None and start_ranks(["resume", *args], options.ranks):
        return
    # Imported here because it imports torch: help and mistakes must not wait for that.
    from cohort.jobs import build

    log = choose_log(options.log or "", sys.stdout.isatty())
    build.resume(path, options.steps, log, *sinks, changes=changes)


def _resume_sweep(path: Path, options: Options) -> None:
    """Continues the sweep in the folder `path`. Raises ConfigError for options that only a run has."""
    for name in ("steps", "log", "sinks"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} cannot be given for a sweep: {path} keeps its plan. Remove it.")
    directory = SweepDirectory.open(path)
    directory.lock()
    check_recipe(directory.plan)
    continue_sweep(directory, options.jobs or 1)
