"""References to tasks: what another process needs to make the same task, and a digest of the grader's code."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cohort.errors import TaskError
from cohort.tasks.base import TASKS, Task, choose_class, list_own_tasks
from cohort.user_code import split_spec


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRef:
    """A task as plain values: its name, its settings, and the user's file that registers it.

    `path` is "" for a built-in task and for one of a plugin.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    path: str = ""

    @staticmethod
    def from_task(task: Task) -> TaskRef:
        """Returns the reference of a task, from which another process can make it.

        Raises TaskError if its settings are no JSON values, and ConfigError if its class is defined in no file.

        >>> from cohort.tasks.arithmetic import Arithmetic
        >>> ref = TaskRef.from_task(Arithmetic(max_terms=4))
        >>> ref.load() == Arithmetic(max_terms=4)
        True
        """
        settings = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}  # type: ignore[arg-type]
        try:
            settings = json.loads(json.dumps(settings))
        except (TypeError, ValueError) as error:
            raise TaskError(
                f'task "{task.name}": a setting cannot be written as JSON ({error}); '
                "use only numbers, strings, booleans and tuples of them as settings"
            ) from error
        where = split_spec(TASKS.make_spec(type(task)))
        return TaskRef(name=task.name, settings=settings, path=str(where[0]) if where else "")

    def load(self) -> Task:
        """Returns the task, made from its registered class and settings.

        Runs the user's file first, if the task comes from one. Raises TaskError for a setting that the task does not
        have or does not allow, ConfigError for a missing file or an unknown task, and UserCodeError if the user's
        file raises.
        """
        cls = choose_class(TASKS.find(f"{self.path}:{self.name}" if self.path else self.name), self.settings)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(self.settings.keys() - fields.keys())
        if unknown:
            raise TaskError(
                f'task "{self.name}" has no setting "{unknown[0]}"; remove it, or use one of {sorted(fields)}'
            )
        made: Task = cls(**{k: _restore_tuple(v, fields[k]) for k, v in self.settings.items()})
        return made


def _restore_tuple(value: Any, setting: dataclasses.Field[Any]) -> Any:
    """Returns `value`, with a list made a tuple if the setting is declared as a tuple or its default is one.

    JSON has no tuples. Lists inside the list stay lists.
    """
    is_tuple = isinstance(setting.default, tuple) or str(setting.type).startswith(("tuple", "Tuple"))
    return tuple(value) if isinstance(value, list) and is_tuple else value


def compute_grader_digest(task: Task) -> str:
    """Returns "NAME-DIGEST" for the code that scores a task; another digest means that scores may have changed.

    The digest covers the source of the task's module and of all loaded modules that it imports from `cohort.tasks` or
    from its own folder or package, directly or through others, the files of functions that its settings name
    (`grader_files`), and the versions of the packages that the task needs.
    `cohort.tasks.base`, this module, settings and other packages are not covered. That of a mixture covers all its
    tasks.
    """
    waiting = [type(task).__module__]
    sources: dict[str, bytes] = {}
    folder = Path(getattr(sys.modules[waiting[0]], "__file__", None) or "").parent
    # The task's own package, if a user's package has it.
    own = "" if waiting[0].startswith("cohort.") else (sys.modules[waiting[0]].__package__ or "").partition(".")[0]
    while waiting:
        name = waiting.pop()
        file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
        is_grader = name.startswith("cohort.tasks.") or (file.is_file() and file.parent == folder)
        is_grader = is_grader or (own != "" and f"{name}.".startswith(f"{own}."))
        # `base` and this module are the machinery around all graders; they are left out.
        if name in sources or not is_grader or name in ("cohort.tasks.base", __name__) or not file.is_file():
            continue
        sources[name] = file.read_bytes()
        waiting += _list_imports(sources[name], sys.modules[name].__package__ or "")
    # Functions that settings name, which are no modules that the task imports.
    for path in getattr(task, "grader_files", ()):
        sources[str(path.name)] = path.read_bytes() if path.is_file() else b""
    versions = [f"{module} {_find_version(module)}" for module in sorted(task.packages)]
    mixed = [compute_grader_digest(part) for part in list_own_tasks(task) if part is not task]
    joined = b"\0".join([*(sources[name] for name in sorted(sources)), *map(str.encode, (*versions, *mixed))])
    return f"{task.name}-{hashlib.sha256(joined).hexdigest()[:12]}"


def _list_imports(source: bytes, package: str) -> Iterator[str]:
    """Yields the names of the modules that Python source imports, also inside functions.

    For `from a import b` these are "a" and "a.b", which need not be a module. `package` is the package of the source,
    to which relative imports refer; "" if it is in none.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Each dot after the first leads to the package above.
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _find_version(module: str) -> str:
    """Returns the version of the package that provides a module; "?" if none is installed."""
    names = importlib.metadata.packages_distributions().get(module, [module])
    try:
        return importlib.metadata.version(names[0])
    except importlib.metadata.PackageNotFoundError:
        return "?"
