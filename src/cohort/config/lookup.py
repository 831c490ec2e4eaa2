"""Find a recipe or a task by name, or in a user's own file: `path/to/file.py:name`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from cohort.config.schema import RunConfig
from cohort.errors import ConfigError, nearest
from cohort.tasks.base import get_task
from cohort.tasks.ref import TaskRef, load_file


def split_spec(spec: str) -> tuple[Path, str] | None:
    """(file, name) of a `file.py:name`, None for a plain name.

    >>> split_spec("my/task.py:reverse")
    (PosixPath('my/task.py'), 'reverse')
    >>> split_spec("countdown") is None
    True
    """
    file, colon, name = spec.rpartition(":")
    if colon and file.endswith(".py"):
        return Path(file), name
    if spec.endswith(".py"):
        raise ConfigError(f'"{spec}" names a file but nothing in it; write {spec}:NAME.')
    return None


def import_file(path: Path) -> ModuleType:
    """The module in `path`, imported once a process. The author's own exceptions keep their traceback."""
    if not path.expanduser().is_file():
        raise ConfigError(f'there is no file "{path}"; check the path before the colon.')
    try:
        return load_file(path)
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}, line {error.lineno}: {error.msg}; fix the file.") from None


def find_recipe(spec: str) -> tuple[str, Callable[[], RunConfig]]:
    """The name to record and the function of a recipe."""
    from cohort.recipes import RECIPES  # recipes import the schema of this package

    where = split_spec(spec)
    if where is None:
        if spec not in RECIPES:
            tail = nearest(spec, RECIPES)
            names = (
                ""
                if tail.startswith(" Valid")
                else f" Recipes: {', '.join(sorted(RECIPES))}, or path/to/file.py:function."
            )
            raise ConfigError(f'unknown recipe "{spec}".{tail}{names}')
        return spec, RECIPES[spec]
    path, name = where
    module = import_file(path)
    function = vars(module).get(name)
    if not callable(function):
        own = [k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise ConfigError(f'there is no function "{name}" in {path}.{nearest(name, own) if own else ""}')
    return f"{path.expanduser().resolve()}:{name}", function


def find_task(spec: str) -> type[Any]:
    """The task class called `spec`, from the registry or from `file.py:name`."""
    where = split_spec(spec)
    if where is None:
        return get_task(spec)
    import_file(where[0])
    return get_task(where[1])


def task_spec(task: Any) -> str:
    """What `find_task` needs to find the class of `task` again, in this process or another."""
    ref = TaskRef.of(task)
    return f"{ref.path}:{ref.name}" if ref.path else ref.name
