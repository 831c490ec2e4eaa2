"""Reading of the TASK words of `cohort eval` and `cohort data`, with the settings of a task as `--task.x` flags."""

from __future__ import annotations

import dataclasses
import keyword
from itertools import takewhile
from typing import Annotated, Any, TypeVar

import tyro

from cohort.cli.arguments import read_arguments
from cohort.config import flags
from cohort.config.lookup import find_task
from cohort.errors import ConfigError
from cohort.tasks.base import list_task_names

T = TypeVar("T")


def read_tasks(command: str, about: str, options: T, args: list[str]) -> tuple[list[Any], T]:
    """Reads the words after a command that takes tasks. Returns the tasks with their settings, and the options.

    `args` begin with the tasks, then come flags: those of the dataclass `options`, and `--task.x` for a setting of a
    single task or `--NAME.x` for one of several tasks. `--help` prints `about` and the flags, and raises SystemExit.
    Raises ConfigError for a mistake, also if there is no task.
    """
    words = list(takewhile(lambda arg: not arg.startswith("-"), args))
    if not words:
        names = ", ".join(list_task_names())
        if not flags.wants_help(args):
            raise ConfigError(
                f"the task is missing; name a task first: cohort {command} TASK [--flags]. Tasks: {names}."
            )
        about += f" TASK is one of {names}, or path/to/file.py:name; put it before --help to see its settings."
        flags.print_help(options, f"cohort {command} TASK", about)
        raise SystemExit(0)
    classes = [find_task(word) for word in words]
    if len(set(classes)) < len(classes):
        raise ConfigError(f"a task is named twice: cohort {command} {' '.join(words)}. Name each task once.")
    keys = ["task"] if len(words) == 1 else [cls.name.replace("-", "_") for cls in classes]
    # A task's name becomes a flag, so it must not be that of an option, of another task, or a keyword of Python.
    taken = {f.name for f in dataclasses.fields(options)}  # type: ignore[arg-type]
    for key in keys:
        if key in taken or keys.count(key) > 1 or keyword.iskeyword(key):
            raise ConfigError(
                f'task "{key}" cannot be named with other tasks, because its flag --{key} would be that of something '
                f"else or a keyword of Python. Run cohort {command} for each task alone."
            )
    # A dataclass with the options and one field per task, from which all flags and their help are made.
    fields: list[Any] = []
    for key, cls in zip(keys, classes, strict=True):
        argument = tyro.conf.arg(help=(cls.__doc__ or "").strip())
        fields.append((key, Annotated[cls, argument], dataclasses.field(default_factory=cls)))
    made = dataclasses.make_dataclass("Options", fields, bases=(type(options),), frozen=True, kw_only=True)
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}  # type: ignore[arg-type]
    _, given = read_arguments(f"{command} {' '.join(words)}", [], about, made(**values), args[len(words) :])
    kept = {name: getattr(given, name) for name in values}
    return [getattr(given, key) for key in keys], type(options)(**kept)


def read_task(command: str, about: str, options: T, args: list[str]) -> tuple[Any, T]:
    """Reads the words after a command that takes one task. Returns the task with its settings, and the options.

    The parameters are those of `read_tasks`. Raises ConfigError if several tasks are given.
    """
    tasks, given = read_tasks(command, about, options, args)
    if len(tasks) > 1:
        raise ConfigError(f"cohort {command} takes one task, but {len(tasks)} are given; run it once per task.")
    return tasks[0], given
