"""Starting and resuming a run of any kind: opens the directory, builds the job, runs its loop, closes everything."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from cohort.config.document import load_variant
from cohort.config.rules import check_values, find_broken_bound
from cohort.config.schema import RunConfig
from cohort.errors import ConfigError
from cohort.logs.escape import join_command
from cohort.logs.forward import forward_logs
from cohort.logs.sinks.registry import make_sinks
from cohort.logs.view import View, make_view
from cohort.run.directory import RunDirectory
from cohort.run.job import Job
from cohort.run.life import Run


class RunnableJob(Job, Protocol):
    """A job that also has a training loop and can be closed."""

    @property
    def config(self) -> RunConfig:
        """The config of the run, in which every setting that depends on the machine is decided."""

    def run_loop(self, run: Run) -> None:
        """Trains for every remaining step of `run`."""

    def close(self) -> None:
        """Ends the processes and connections that the job has opened."""


JobBuilder = Callable[[RunConfig], RunnableJob]
"""Loads the model and the data that a config names, and returns the job."""


def start_run(
    config: RunConfig, build_job: JobBuilder, out: Path, log: str, sinks: Sequence[str], name: str | None = None
) -> Path:
    """Trains a config in a new run directory below `out`, to the last step. Returns the path of the directory.

    `build_job` makes the job from the config. `log` names the terminal output (see `make_view`), `sinks` the programs
    that also get the metrics. `name` is that of the directory; None = a new one is made. If a
    signal stops the run, saves a checkpoint and raises KeyboardInterrupt. The job is closed in any case.
    """
    # A sink that cannot work is refused before the model is loaded.
    views = make_sinks(sinks)
    job = build_job(config)
    try:
        # Called from Python, there is no command that could be repeated.
        is_command = sys.argv[1:2] == ["train"]
        typed = (
            join_command(["cohort", *sys.argv[1:]]) if is_command else "# started from Python: the settings are below"
        )
        directory = RunDirectory.create(out, job.config, name, command=typed)
        _run_job(job, directory, log, views)
    finally:
        job.close()
    return directory.path


def resume_run(path: Path, build_job: JobBuilder, steps: int | None, log: str, sinks: Sequence[str]) -> Path:
    """Continues the run in `path` from its newest checkpoint, and returns `path`.

    `steps` is the new total number of steps; None keeps the run's number. The other parameters and signals are as in
    `start_run`. Raises RunError if another process writes the run, or `steps` is less than before, and ConfigError if
    config.yaml has values that no run may have.
    """
    views = make_sinks(sinks)
    # A run that is resumed was started here, or its user decided to trust it: its own code is run.
    directory = RunDirectory.open(path, load_variant)
    # Refuses a second writer before anything is loaded.
    directory.lock()
    config = directory.config if steps is None else replace(directory.config, steps=steps)
    directory.require_same_settings(config)
    _require_valid_values(directory, config)
    job = build_job(config)
    try:
        _run_job(job, directory, log, views)
    finally:
        job.close()
    return directory.path


def _require_valid_values(directory: RunDirectory, config: RunConfig) -> None:
    """Raises ConfigError if config.yaml has values that no run may have: it was edited, or is damaged.

    Before the first checkpoint nothing else would notice.
    """
    if broken := find_broken_bound(config):
        setting, bound = broken
        raise ConfigError(
            f"{directory.config_file}: {setting.name} is {setting.value}; it must be {bound.wording}. The file was "
            "changed by hand or is damaged: correct the value there."
        )
    try:
        check_values(config)
    except ConfigError as error:
        raise ConfigError(
            f"{directory.config_file} was changed by hand or is damaged, and has settings that contradict each other: "
            f"{error} (Change them in this file: `cohort resume` does not take the flags.)"
        ) from error


def _run_job(job: RunnableJob, directory: RunDirectory, log: str, sinks: Mapping[str, View]) -> None:
    """Trains for the remaining steps and finishes the run. Raises KeyboardInterrupt if it is not complete then.

    That is so after a signal. `log` names the terminal output; `sinks` are by name.
    """
    with Run(directory, job.config, job, make_view(log), sinks) as run, forward_logs(run.record_event, run.show_notice):
        job.run_loop(run)
        summary = run.finish()
    # Everything is saved, but the caller must not continue as if the run were complete.
    if not summary.complete:
        raise KeyboardInterrupt
