"""`cohort resume RUN [--steps N] [--log live|plain|json] [--sinks NAME,...]`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path

from cohort.cli.arguments import read
from cohort.cli.output import Log, choose_log, choose_sinks
from cohort.config import flags
from cohort.config.kinds import KINDS
from cohort.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything else comes from the run's own config.yaml and cannot change."""

    steps: int | None = None
    """Train up to this step instead, to extend a run; None = as configured."""
    log: Log | None = None
    """Progress; None = live on a terminal, plain elsewhere."""
    sinks: str | None = None
    """Metrics also to these, separated by commas: wandb, tensorboard, trackio. A run does not remember them."""


def run(args: list[str]) -> None:
    settings = {field.name for kind in KINDS.values() for field in fields(kind)} - {"steps"}
    for flag in flags.split(args)[1]:
        if flag.name.partition(".")[0] in settings:
            raise ConfigError(
                f"{flag.shown} cannot change: a run keeps its settings, only --steps may grow. Start a new run instead."
            )
    (where,), options = read(
        "resume", ["RUN"], "Continue the run in directory RUN exactly where it stopped.", Options(), args
    )
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps is {options.steps}; it must be at least 1.")
    sinks = choose_sinks(options.sinks)
    from cohort.jobs import build

    build.resume(Path(where), options.steps, choose_log(options.log or "", sys.stdout.isatty()), *sinks)
