"""The TASK word of `cohort eval` and `cohort data`: its class, and its knobs as `--task.x` flags."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, TypeVar

import tyro

from cohort.cli.arguments import read
from cohort.config import flags
from cohort.config.lookup import find_task
from cohort.errors import ConfigError
from cohort.tasks.base import task_names

T = TypeVar("T")


def read_task(command: str, about: str, options: T, args: list[str]) -> tuple[Any, T]:
    """The task with its knobs, and the options; TASK is the first word."""
    if not args or args[0].startswith("-"):
        names = ", ".join(task_names())
        if not flags.wants_help(args):
            raise ConfigError(f"name a task first: cohort {command} TASK [--flags]. Tasks: {names}.")
        about += f" TASK is one of {names}, or path/to/file.py:name; add it before --help to see its knobs."
        flags.print_help(options, f"cohort {command} TASK", about)
        raise SystemExit(0)
    spec, *rest = args
    cls = find_task(spec)
    knobs = tyro.conf.arg(help=(cls.__doc__ or "").strip())
    task_field: Any = ("task", Annotated[cls, knobs], dataclasses.field(default_factory=cls))
    made = dataclasses.make_dataclass("Options", [task_field], bases=(type(options),), frozen=True, kw_only=True)
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}  # type: ignore[arg-type]
    _, given = read(f"{command} {spec}", [], about, made(**values), rest)
    kept = {name: getattr(given, name) for name in values}
    return getattr(given, "task"), type(options)(**kept)  # noqa: B009 (a field mypy cannot know)
