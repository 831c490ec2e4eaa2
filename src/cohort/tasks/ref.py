"""References to tasks: what another process needs to make the same task, and a digest of the grader's code."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from cohort.errors import TaskError
from cohort.tasks.base import BUILT_IN, Task, get_task


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRef:
    """A task as plain values: its name, its settings, and the user's file that registers it.

    `path` is "" for a built-in task.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    path: str = ""

    @staticmethod
    def from_task(task: Task) -> TaskRef:
        """Returns the reference of a task, from which another process can make it.

        Raises TaskError if its settings are no JSON values, or if its class is not built-in and not defined in a file.

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
        source = "" if task.name in BUILT_IN else vars(type(task)).get("_source", "")
        if task.name not in BUILT_IN and not source:
            raise TaskError(
                f'task "{task.name}" is not defined in a file, so no scoring worker can load it; put its class '
                "into a .py file and import it from there"
            )
        return TaskRef(name=task.name, settings=settings, path=source)

    def load(self) -> Task:
        """Returns the task, made from its registered class and settings.

        Runs the user's file first, if the task comes from one. Raises TaskError for a missing file and for a setting
        that the task does not have or does not allow, ConfigError for an unknown task, and whatever the user's file
        raises.
        """
        if self.path:
            load_file(self.path)
        cls = get_task(self.name)
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
    from its own folder, directly or through others, and the versions of the packages that the task needs.
    `cohort.tasks.base`, this module, settings and other packages are not covered.
    """
    waiting = [type(task).__module__]
    sources: dict[str, bytes] = {}
    folder = Path(getattr(sys.modules[waiting[0]], "__file__", None) or "").parent
    while waiting:
        name = waiting.pop()
        file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
        is_grader = name.startswith("cohort.tasks.") or (file.is_file() and file.parent == folder)
        # `base` and this module are the machinery around all graders; they are left out.
        if name in sources or not is_grader or name in ("cohort.tasks.base", __name__) or not file.is_file():
            continue
        sources[name] = file.read_bytes()
        waiting += _list_imports(sources[name])
    versions = [f"{module} {_find_version(module)}" for module in sorted(task.packages)]
    joined = b"\0".join([*(sources[name] for name in sorted(sources)), *map(str.encode, versions)])
    return f"{task.name}-{hashlib.sha256(joined).hexdigest()[:12]}"


def _list_imports(source: bytes) -> Iterator[str]:
    """Yields the names of the modules that Python source imports, also inside functions.

    For `from a import b` these are "a" and "a.b", which need not be a module. Dots of relative imports are lost, and
    `from . import b` yields nothing.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _find_version(module: str) -> str:
    """Returns the version of the package that provides a module; "?" if none is installed."""
    names = importlib.metadata.packages_distributions().get(module, [module])
    try:
        return importlib.metadata.version(names[0])
    except importlib.metadata.PackageNotFoundError:
        return "?"


def load_file(path: str | Path) -> ModuleType:
    """Runs a user's Python file, unless it was loaded before, and returns its module.

    The file's folder is appended to `sys.path`, so that the file can import its neighbours. A file that runs as
    __main__ is run again. Raises TaskError if there is no such Python file, and whatever the file raises; then the next
    call runs it again.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise TaskError(f"there is no file {file} to load a task from; correct the path, or put the file back")
    # The file may have been imported under another name: then that module is the one to return. A script that runs as
    # __main__ is loaded again, under a name of its own.
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(file) and module.__name__ != "__main__":
            return module
    name = f"cohort_user_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise TaskError(f"{file} is not a Python file; name a file that ends in .py")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # A half-executed module must not be found by the next call.
        del sys.modules[name]
        raise
    return module
