"""Starting and resuming a run of any kind: the directory, the job, the views, and the end of each."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from cohort.config.schema import RunConfig
from cohort.logs.forward import forwarded
from cohort.logs.sinks.registry import make_sinks
from cohort.logs.view import View, make_view
from cohort.run.directory import RunDirectory
from cohort.run.job import Job
from cohort.run.life import Run


class Work(Job, Protocol):
    """A job with its loop."""

    @property
    def config(self) -> RunConfig:
        """With what depends on the machine decided."""

    def work(self, run: Run) -> None:
        """Do every remaining step of `run`."""

    def close(self) -> None: ...


Make = Callable[[RunConfig], Work]


def start(config: RunConfig, make: Make, out: Path, log: str, sinks: Sequence[str]) -> Path:
    """Run a config in a new run directory; returns where it is. Asked to stop, saves and raises KeyboardInterrupt."""
    views = make_sinks(sinks)
    work = make(config)
    try:
        typed = shlex.join(["cohort", *sys.argv[1:]]) if sys.argv[1:2] == ["train"] else ""  # not from Python
        directory = RunDirectory.create(out, work.config, command=typed)
        _live(work, directory, log, views)
    finally:
        work.close()
    return directory.path


def go_on(path: Path, make: Make, steps: int | None, log: str, sinks: Sequence[str]) -> Path:
    """Continue a run exactly where it stopped, to `steps` if given; stops as `start` does."""
    views = make_sinks(sinks)
    directory = RunDirectory.open(path)
    directory.lock()  # a second writer is refused before it loads anything
    config = directory.config if steps is None else replace(directory.config, steps=steps)
    directory.require_same(config)
    work = make(config)
    try:
        _live(work, directory, log, views)
    finally:
        work.close()
    return directory.path


def _live(work: Work, directory: RunDirectory, log: str, sinks: Mapping[str, View]) -> None:
    with Run(directory, work.config, work, make_view(log), sinks) as run, forwarded(run.event, run.notice):
        work.work(run)
        summary = run.finish()
    if not summary.complete:  # all is saved; whoever called must not go on as if it were done
        raise KeyboardInterrupt
