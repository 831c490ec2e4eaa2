"""Search for recipes and tasks by name: built-in ones, those of plugins, or `path/to/file.py:name` in a user's file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from cohort.config.hints import find_recipe_remedy
from cohort.config.schema import RunConfig
from cohort.errors import ConfigError, suggest_name
from cohort.system.paths import expand_home
from cohort.tasks.base import TASKS
from cohort.user_code import get_function, list_functions, load_file, load_plugins, split_spec


def find_recipe(spec: str) -> tuple[str, Callable[[], RunConfig]]:
    """Returns (name to record in config.yaml, function that returns the config) of the recipe that `spec` names.

    `spec` is a registered name, also one of a plugin, or `file.py:function`, whose file is run; of the latter the
    recorded name has the full path. The function is not called, and any callable of that name is accepted. Raises a
    ConfigError if there is no such recipe, and a UserCodeError if the file raises.
    """
    # Imported here because recipes import modules of this package.
    from cohort.recipes import RECIPES

    if spec.endswith(".py") and expand_home(spec).is_file():
        raise ConfigError(
            f'"{spec}" names a file but no function in it. {_describe_file(Path(spec), load_file(spec), "")}'
        )
    where = split_spec(spec)
    if where is None and (Path(spec) / "config.yaml").is_file():
        raise ConfigError(
            f"{spec} is a run, not a recipe. Continue it with cohort resume {spec}, or start a new run with its "
            f"settings: cohort train {Path(spec) / 'config.yaml'}."
        )
    if where is None:
        failures = {} if spec in RECIPES else load_plugins()
        if spec not in RECIPES:
            remedy = find_recipe_remedy(spec) or (
                f"{suggest_name(spec, RECIPES).strip()} Name a recipe, or path/to/file.py:function; cohort train "
                "--help lists all recipes."
            )
            raise ConfigError(
                f'unknown recipe "{spec}". {remedy}' + "".join(f" {failure}" for failure in failures.values())
            )
        return spec, RECIPES[spec]
    path, name = where
    module = load_file(path)
    function = vars(module).get(name)
    # A task is named by its class or by the name that it is registered under, which no function of the file has.
    task = TASKS.get_name(function) if isinstance(function, type) else None if callable(function) else name
    if task in TASKS.list_in_file(path):
        raise ConfigError(f'"{name}" in {path} is a task, not a recipe. {_describe_file(path, module, str(task))}')
    return f"{expand_home(path).resolve()}:{name}", get_function(module, name, path)


def _describe_file(path: Path, module: ModuleType, task: str) -> str:
    """Returns what to write to train with a user's file: one of its functions, or its task in another recipe.

    `task` is the name of the task that the user means; "" = any of the file.
    """
    functions = ", ".join(f"{path}:{name}" for name in list_functions(module)) or "none"
    tasks = [task] if task else TASKS.list_in_file(path)
    choices = "".join(f" Or use the task in a recipe: cohort train RECIPE --task {path}:{name}." for name in tasks)
    return f"A recipe is a function that returns a config; functions in the file: {functions}.{choices}"


def find_task(spec: str) -> type[Any]:
    """Returns the task class that `spec` names: a registered name or `file.py:name`, whose file is run.

    Raises a ConfigError if there is no such file or task, and a UserCodeError if the file raises.
    """
    return TASKS.find(spec)
