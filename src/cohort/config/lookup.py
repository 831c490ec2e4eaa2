"""Search for recipes and tasks by name: built-in ones, or those in a user's file as `path/to/file.py:name`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from cohort.config.schema import RunConfig
from cohort.errors import ConfigError, suggest_name
from cohort.tasks.base import get_task
from cohort.tasks.ref import TaskRef, load_file


def split_spec(spec: str) -> tuple[Path, str] | None:
    """Returns (file, name) for a text `file.py:name`, and None for a plain name.

    Raises a ConfigError for `file.py` without a colon. Whether the file or the name exists is not checked.

    >>> split_spec("my/task.py:reverse")
    (PosixPath('my/task.py'), 'reverse')
    >>> split_spec("countdown") is None
    True
    """
    file, colon, name = spec.rpartition(":")
    if colon and file.endswith(".py"):
        return Path(file), name
    if spec.endswith(".py"):
        raise ConfigError(f'"{spec}" names a file but no function or task in it; write {spec}:NAME with its name.')
    return None


def import_file(path: Path) -> ModuleType:
    """Imports the Python file `path` and returns the module. A file is imported once per process.

    Its folder is appended to `sys.path`. Raises a ConfigError for missing files and syntax errors. Other exceptions of
    the file pass through, because their traceback shows its author where they come from.
    """
    if not path.expanduser().is_file():
        raise ConfigError(f'there is no file "{path}"; check the path before the colon.')
    try:
        return load_file(path)
    except SyntaxError as error:
        raise ConfigError(
            f"{error.filename or path}, line {error.lineno or 1} is not valid Python: {error.msg}; correct the file."
        ) from None


def find_recipe(spec: str) -> tuple[str, Callable[[], RunConfig]]:
    """Returns (name to record in config.yaml, function that returns the config) of the recipe that `spec` names.

    `spec` is a registered name or `file.py:function`, whose file is imported; of the latter the recorded name has the
    full path. The function is not called, and any callable of that name is accepted. Raises a ConfigError if there is
    no such recipe.
    """
    # Imported here because recipes import modules of this package.
    from cohort.recipes import RECIPES

    where = split_spec(spec)
    if where is None:
        if spec not in RECIPES:
            suggestion = suggest_name(spec, RECIPES)
            # A suggestion that begins with " Valid" has all names already.
            names = "" if suggestion.startswith(" Valid") else f" Recipes: {', '.join(sorted(RECIPES))}."
            raise ConfigError(
                f'unknown recipe "{spec}".{suggestion}{names} Name one of them, or path/to/file.py:function.'
            )
        return spec, RECIPES[spec]
    path, name = where
    module = import_file(path)
    function = vars(module).get(name)
    if not callable(function):
        # Only functions defined in the file are suggested, not those that it imports.
        own = [k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        suggestion = suggest_name(name, own) if own else " The file defines no function."
        raise ConfigError(
            f'there is no function "{name}" in {path}.{suggestion} Correct the name after the colon, or define the '
            "function in that file."
        )
    return f"{path.expanduser().resolve()}:{name}", function


def find_task(spec: str) -> type[Any]:
    """Returns the task class that `spec` names: a registered name or `file.py:name`, whose file is imported.

    With a file, too, the name is looked up among all registered tasks. Raises a ConfigError if there is no such file or
    task, or if the file has a syntax error.
    """
    where = split_spec(spec)
    if where is None:
        return get_task(spec)
    import_file(where[0])
    return get_task(where[1])


def make_task_spec(task: Any) -> str:
    """Returns the text by which `find_task` finds the class of `task` again, in this process or another.

    It is the name of the task, or `/path/to/file.py:name` for a task in a user's file. Settings of the task are not in
    it. Raises TaskError if the class is not defined in a file or its settings are no JSON values.
    """
    ref = TaskRef.from_task(task)
    return f"{ref.path}:{ref.name}" if ref.path else ref.name
