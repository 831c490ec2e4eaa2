"""Starting and resuming a run of any kind: opens the directory, builds the job, runs its loop, closes everything."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from cohort.config.document import dump_config, load_variant, parse_config
from cohort.config.resuming import change_settings
from cohort.config.rules import check_values, find_broken_bound
from cohort.config.schema import RunConfig
from cohort.errors import ConfigError
from cohort.logs.escape import join_command
from cohort.logs.forward import forward_logs
from cohort.logs.printing import show_records
from cohort.logs.sinks.registry import make_sinks
from cohort.logs.view import View, make_view
from cohort.ranks.agree import agree_on_errors
from cohort.ranks.environment import RENDEZVOUS, count_local_ranks
from cohort.run.directory import RunDirectory
from cohort.run.job import Job
from cohort.run.life import Run
from cohort.run.together import FollowingRun
from cohort.world import ONE_PROCESS, World


class RunnableJob(Job, Protocol):
    """A job that also has a training loop and can be closed."""

    @property
    def config(self) -> RunConfig:
        """The config of the run, in which every setting that depends on the machine is decided."""

    def run_loop(self, run: Run | FollowingRun) -> None:
        """Trains for every remaining step of `run`."""

    def close(self) -> None:
        """Ends the processes and connections that the job has opened."""


JobBuilder = Callable[[RunConfig, World], RunnableJob]
"""Loads the model and the data that a config names, and returns the job of one of the ranks of a world."""


def start_run(
    config: RunConfig,
    build_job: JobBuilder,
    out: Path,
    log: str,
    sinks: Sequence[str],
    name: str | None = None,
    world: World = ONE_PROCESS,
) -> Path:
    """Trains a config in a new run directory below `out`, to the last step. Returns the path of the directory.

    `build_job` makes the job from the config. `log` names the terminal output (see `make_view`), `sinks` the programs
    that also get the metrics. `name` is that of the directory; None = a new one is made. Of several ranks in `world`
    the first has the directory, and its config counts. If a signal stops the run, saves a checkpoint and raises
    KeyboardInterrupt. The job is closed in any case.
    """
    config = _share_config(config, world)
    views, job = agree_on_errors(world, lambda: _prepare(config, build_job, sinks, world))
    try:
        directory = agree_on_errors(world, lambda: _create_directory(out, job, name) if world.is_first else None)
        _run_job(job, directory, log, views, world)
    finally:
        job.close()
    return out if directory is None else directory.path


def _prepare(
    config: RunConfig, build_job: JobBuilder, sinks: Sequence[str], world: World
) -> tuple[dict[str, View], RunnableJob]:
    """Returns the sinks, none on ranks but the first, and the job."""
    # A sink that cannot work is refused before the model is loaded.
    views = make_sinks(sinks if world.is_first else ())
    # Servers take a minute and more to start, and nothing else is shown yet.
    with show_records("cohort.engines.fleet") if world.is_first else nullcontext():
        return views, build_job(config, world)


def _create_directory(out: Path, job: RunnableJob, name: str | None) -> RunDirectory:
    """Returns a new run directory below `out`, with the config of the job and the command that the user typed."""
    # Called from Python, there is no command that could be repeated.
    is_command = sys.argv[1:2] == ["train"]
    # The launcher has removed its own flag from the command of a rank.
    ranks = ["--ranks", str(count_local_ranks())] if RENDEZVOUS in os.environ else []
    words = ["cohort", *sys.argv[1:], *ranks]
    typed = join_command(words) if is_command else "# started from Python: the settings are below"
    return RunDirectory.create(out, job.config, name, command=typed)


def _share_config(config: RunConfig | None, world: World) -> RunConfig:
    """Returns the config of the first rank. On other machines a default, such as the date, may differ."""
    if world.is_first:
        assert config is not None
        world.share(dump_config(config))
        return config
    return parse_config(world.share(""), "the config of the first rank", find=load_variant)


def resume_run(
    path: Path,
    build_job: JobBuilder,
    steps: int | None,
    log: str,
    sinks: Sequence[str],
    world: World = ONE_PROCESS,
    changes: Sequence[str] = (),
) -> Path:
    """Continues the run in `path` from its newest checkpoint, and returns `path`.

    `steps` is the new total number of steps; None keeps the run's number. `changes` are other settings with new
    values, as words of a command line. The other parameters and signals are as in `start_run`. Only the first rank
    reads `path`. Raises RunError if another process writes the run, or `steps` is less than before, and ConfigError if
    config.yaml has values that no run may have.
    """
    opened = agree_on_errors(world, lambda: _open_locked(path, steps, changes) if world.is_first else None)
    directory, config = opened if opened is not None else (None, None)
    settings = _share_config(config, world)
    views, job = agree_on_errors(world, lambda: _prepare(settings, build_job, sinks, world))
    try:
        _run_job(job, directory, log, views, world)
    finally:
        job.close()
    return path


def _open_locked(path: Path, steps: int | None, changes: Sequence[str]) -> tuple[RunDirectory, RunConfig]:
    """Opens and locks a run. Returns its directory, and its config with what changes."""
    # A run that is resumed was started here, or its user decided to trust it: its own code is run.
    directory = RunDirectory.open(path, load_variant)
    # Refuses a second writer before anything is loaded.
    directory.lock()
    config = directory.config if steps is None else replace(directory.config, steps=steps)
    config = change_settings(config, changes)
    directory.require_same_settings(config)
    _require_valid_values(directory, config)
    return directory, config


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


def _run_job(
    job: RunnableJob, directory: RunDirectory | None, log: str, sinks: Mapping[str, View], world: World
) -> None:
    """Trains for the remaining steps and finishes the run. Raises KeyboardInterrupt if it is not complete then.

    That is so after a signal. `log` names the terminal output; `sinks` are by name. `directory` is None on every rank
    but the first, which then does what the first one says.
    """
    if directory is None:
        with FollowingRun(job, world) as following:
            job.run_loop(following)
        is_complete = following.is_complete
    else:
        view = make_view(log)
        with (
            Run(directory, job.config, job, view, sinks, world=world) as run,
            forward_logs(run.record_event, run.show_notice),
        ):
            job.run_loop(run)
            is_complete = run.finish().complete
    # Everything is saved, but the caller must not continue as if the run were complete.
    if not is_complete:
        raise KeyboardInterrupt
