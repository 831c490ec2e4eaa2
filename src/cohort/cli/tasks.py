"""Reading of the tasks that commands name, as words or by --task, with the settings of a task as `--task.x` flags."""

from __future__ import annotations

import dataclasses
import keyword
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from itertools import takewhile
from typing import Annotated, Any, TypeVar

import tyro

from cohort.cli.arguments import read_arguments
from cohort.config import flags
from cohort.config.help import print_settings_help
from cohort.config.lookup import find_task
from cohort.errors import ConfigError
from cohort.tasks.base import choose_task, list_task_names, make_with_defaults
from cohort.user_code import load_plugins

T = TypeVar("T")


def read_tasks(command: str, about: str, options: T, args: list[str]) -> tuple[list[Any], T]:
    """Reads the words after a command that takes tasks. Returns the tasks with their settings, and the options.

    `args` begin with the tasks, then come flags: those of the dataclass `options`, and `--task.x` for a setting of a
    single task or `--NAME.x` for one of several tasks. `--help` prints `about` and the flags, and raises SystemExit.
    Raises ConfigError for a mistake, also if there is no task.
    """
    words = list(takewhile(lambda arg: not arg.startswith("-"), args))
    if not words:
        load_plugins()
        names = ", ".join(list_task_names())
        if not flags.wants_help(args):
            raise ConfigError(
                f"the task is missing; name a task first: cohort {command} TASK [--flags]. Tasks: {names}."
            )
        about += f" TASK is one of {names}, or path/to/file.py:name; put it before --help to see its settings."
        print_settings_help(options, f"cohort {command} TASK", about, has_switches=True)
        raise SystemExit(0)
    for word in words:
        flags.raise_if_misplaced(word, flags.collect_settings(options))
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
    given_flags = flags.split_args(args[len(words) :])[1]
    default = _add_tasks(options, dict(zip(keys, classes, strict=True)), given_flags)
    _, given = read_arguments(f"{command} {' '.join(words)}", [], about, default, args[len(words) :])
    kept = {f.name: getattr(given, f.name) for f in dataclasses.fields(options)}  # type: ignore[arg-type]
    return [getattr(given, key) for key in keys], type(options)(**kept)


def _add_tasks(options: Any, classes: Mapping[str, type], given: Sequence[flags.Flag]) -> Any:
    """Returns a dataclass instance with the options and one field per task, from which flags and help are made.

    `classes` are the classes of the tasks by the name of their field, which replaces an option of that name. `given`
    are the flags of the command line, which may decide what settings a task has.
    """
    fields: list[Any] = []
    for key, cls in classes.items():
        task = choose_task(make_with_defaults(cls), flags.collect_given_values(given, f"{key}."))
        argument = tyro.conf.arg(help=(type(task).__doc__ or "").strip())
        default = dataclasses.field(default_factory=partial(copy, task))
        fields.append((key, Annotated[type(task), argument], default))
    made = dataclasses.make_dataclass("Options", fields, bases=(type(options),), frozen=True, kw_only=True)
    return made(**{f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name not in classes})


def read_task_flag(
    command: str, places: Sequence[str], about: str, options: T, args: Sequence[str]
) -> tuple[list[str], Any, T]:
    """Reads the words after a command that takes a task by the flag --task.

    Returns the positional words, the task with its settings (None = no --task is given), and the options. `options` is
    a dataclass with a field `task`, a string; `--task.x` are settings of the task that --task names. The other
    parameters and errors are those of `read_arguments`.
    """
    named = [flag.values[0] for flag in flags.split_args(args)[1] if flag.name == "task" and flag.values]
    if len(named) != 1:
        words, plain = read_arguments(command, places, about, options, args)
        return words, None, plain
    default = _add_tasks(options, {"task": find_task(named[0])}, flags.split_args(args)[1])
    # The flag itself is done with; words behind its value are positional.
    rest: list[str] = []
    for before, arg in zip(["", *args], args, strict=False):
        if arg != "--task" and before != "--task" and not arg.startswith("--task="):
            rest.append(arg)
    words, given = read_arguments(f"{command} --task {named[0]}", places, about, default, rest)
    kept = {f.name: getattr(given, f.name) for f in dataclasses.fields(options)}  # type: ignore[arg-type]
    return words, given.task, type(options)(**{**kept, "task": named[0]})


def read_task(command: str, about: str, options: T, args: list[str]) -> tuple[Any, T]:
    """Reads the words after a command that takes one task. Returns the task with its settings, and the options.

    The parameters are those of `read_tasks`. Raises ConfigError if several tasks are given.
    """
    tasks, given = read_tasks(command, about, options, args)
    if len(tasks) > 1:
        raise ConfigError(f"cohort {command} takes one task, but {len(tasks)} are given; run it once per task.")
    return tasks[0], given
