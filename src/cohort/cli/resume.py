"""`cohort resume RUN [--steps N] [--log live|plain|json] [--sinks NAME,...]`: continues a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path

from cohort.cli.arguments import read_arguments
from cohort.cli.output import Log, choose_log, parse_sink_names
from cohort.config import flags
from cohort.config.kinds import KINDS
from cohort.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """What may change in a resumed run. All other settings come from its config.yaml."""

    steps: int | None = None
    """Extend the run: train up to this step; None = as configured."""
    log: Log | None = None
    """How progress is shown; None = live on a terminal, plain elsewhere."""
    sinks: str | None = None
    """Send metrics to these too, separated by commas: wandb, tensorboard, trackio. Not stored with the run."""


def run(args: list[str]) -> None:
    """Runs `cohort resume` with `args`, the words after it: continues a run until its last step.

    Raises ConfigError for flags that would change another setting than the number of steps.
    """
    # A flag that would change a setting of the run gets an error of its own, not just "unknown flag".
    settings = {field.name for kind in KINDS.values() for field in fields(kind)} - {"steps"}
    for flag in flags.split_args(args)[1]:
        if flag.name.partition(".")[0] in settings:
            raise ConfigError(
                f"{flag.spelling} cannot change: a run keeps its settings, only --steps may grow. "
                "Remove it, or start a new run with it: cohort train RECIPE --flags."
            )
    (where,), options = read_arguments(
        "resume", ["RUN"], "Continue the run in directory RUN exactly where it stopped.", Options(), args
    )
    if options.steps is not None and options.steps < 1:
        raise ConfigError(
            f"--steps is {options.steps}; it must be at least 1: the number of the step at which the run ends. "
            "Correct it, or remove it to keep the run's own number."
        )
    sinks = parse_sink_names(options.sinks)
    # Imported here because it imports torch: help and mistakes must not wait for that.
    from cohort.jobs import build

    build.resume(Path(where), options.steps, choose_log(options.log or "", sys.stdout.isatty()), *sinks)
