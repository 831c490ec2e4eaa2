"""A task by name: what another process needs to make the same task."""

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
    """Name, knob values, and the user's file that registers the task ("" for a built-in one)."""

    name: str
    knobs: dict[str, Any] = field(default_factory=dict)
    path: str = ""

    @staticmethod
    def of(task: Task) -> TaskRef:
        """The reference of an instance.

        >>> from cohort.tasks.arithmetic import Arithmetic
        >>> ref = TaskRef.of(Arithmetic(max_terms=4))
        >>> ref.load() == Arithmetic(max_terms=4)
        True
        """
        knobs = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}  # type: ignore[arg-type]
        try:
            knobs = json.loads(json.dumps(knobs))
        except (TypeError, ValueError) as error:
            raise TaskError(f'task "{task.name}": its knobs must be plain values ({error})') from error
        source = "" if task.name in BUILT_IN else vars(type(task)).get("_source", "")
        if task.name not in BUILT_IN and not source:
            raise TaskError(f'task "{task.name}" is not defined in a file, so no worker can load it')
        return TaskRef(name=task.name, knobs=knobs, path=source)

    def load(self) -> Task:
        """The task, made from its registered class; loads the user's file first."""
        if self.path:
            load_file(self.path)
        cls = get_task(self.name)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(self.knobs.keys() - fields.keys())
        if unknown:
            raise TaskError(f'task "{self.name}" has no knob "{unknown[0]}"; it has {sorted(fields)}')
        made: Task = cls(**{k: _restore(v, fields[k]) for k, v in self.knobs.items()})
        return made


def _restore(value: Any, knob: dataclasses.Field[Any]) -> Any:
    """JSON knows no tuples: a list goes back to one where the knob is declared as one."""
    is_tuple = isinstance(knob.default, tuple) or str(knob.type).startswith(("tuple", "Tuple"))
    return tuple(value) if isinstance(value, list) and is_tuple else value


def grader_digest(task: Task) -> str:
    """Names the code that scores this task: its module, what that imports of the tasks and from its own folder, and
    the versions of the packages it needs."""
    waiting, sources = [type(task).__module__], {}
    home = Path(getattr(sys.modules[waiting[0]], "__file__", None) or "").parent
    while waiting:
        name = waiting.pop()
        file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
        own = name.startswith("cohort.tasks.") or (file.is_file() and file.parent == home)
        if name in sources or not own or name in ("cohort.tasks.base", __name__) or not file.is_file():
            continue
        sources[name] = file.read_bytes()
        waiting += _imported(sources[name])
    versions = [f"{module} {_version(module)}" for module in sorted(task.packages)]
    joined = b"\0".join([*(sources[name] for name in sorted(sources)), *map(str.encode, versions)])
    return f"{task.name}-{hashlib.sha256(joined).hexdigest()[:12]}"


def _imported(source: bytes) -> Iterator[str]:
    """The names that a module imports, each perhaps a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _version(module: str) -> str:
    names = importlib.metadata.packages_distributions().get(module, [module])
    try:
        return importlib.metadata.version(names[0])
    except importlib.metadata.PackageNotFoundError:
        return "?"


def load_file(path: str | Path) -> ModuleType:
    """Run a user's Python file once and return its module; its folder becomes importable."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise TaskError(f"no such file: {file}; a task file is a Python file with an @cohort.task class")
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(file) and module.__name__ != "__main__":
            return module
    name = f"cohort_user_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise TaskError(f"{file} is not a Python file; its name must end in .py")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
