"""The TASK word of `cohort eval` and `cohort data`: its class, and its knobs as `--task.x` flags."""

from __future__ import annotations

import dataclasses
import keyword
from itertools import takewhile
from typing import Annotated, Any, TypeVar

import tyro

from cohort.cli.arguments import read
from cohort.config import flags
from cohort.config.lookup import find_task
from cohort.errors import ConfigError
from cohort.tasks.base import task_names

T = TypeVar("T")


def read_tasks(command: str, about: str, options: T, args: list[str]) -> tuple[list[Any], T]:
    """The tasks with their knobs, and the options; TASK is the first word, more may follow before the flags.

    The knobs of a single task are `--task.x`, those of several `--NAME.x`.
    """
    words = list(takewhile(lambda arg: not arg.startswith("-"), args))
    if not words:
        names = ", ".join(task_names())
        if not flags.wants_help(args):
            raise ConfigError(f"name a task first: cohort {command} TASK [--flags]. Tasks: {names}.")
        about += f" TASK is one of {names}, or path/to/file.py:name; add it before --help to see its knobs."
        flags.print_help(options, f"cohort {command} TASK", about)
        raise SystemExit(0)
    classes = [find_task(word) for word in words]
    if len(set(classes)) < len(classes):
        raise ConfigError(f"a task is named twice: cohort {command} {' '.join(words)}.")
    keys = ["task"] if len(words) == 1 else [cls.name.replace("-", "_") for cls in classes]
    taken = {f.name for f in dataclasses.fields(options)}  # type: ignore[arg-type]
    for key in keys:
        if key in taken or keys.count(key) > 1 or keyword.iskeyword(key):
            raise ConfigError(f'the name of task "{key}" is taken among these flags; evaluate it by itself.')
    fields: list[Any] = []
    for key, cls in zip(keys, classes, strict=True):
        knobs = tyro.conf.arg(help=(cls.__doc__ or "").strip())
        fields.append((key, Annotated[cls, knobs], dataclasses.field(default_factory=cls)))
    made = dataclasses.make_dataclass("Options", fields, bases=(type(options),), frozen=True, kw_only=True)
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}  # type: ignore[arg-type]
    _, given = read(f"{command} {' '.join(words)}", [], about, made(**values), args[len(words) :])
    kept = {name: getattr(given, name) for name in values}
    return [getattr(given, key) for key in keys], type(options)(**kept)


def read_task(command: str, about: str, options: T, args: list[str]) -> tuple[Any, T]:
    """The same for a command that takes one."""
    tasks, given = read_tasks(command, about, options, args)
    if len(tasks) > 1:
        raise ConfigError(f"cohort {command} takes one task, not {len(tasks)}.")
    return tasks[0], given
