"""Tables of what users choose by name: tasks, recipes, algorithms and the other variants of a config.

A name is a built-in one, one that an installed plugin registers, or `path/to/file.py:name` for code in a user's file.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from cohort.errors import ConfigError, suggest_name
from cohort.system.paths import expand_home
from cohort.user_code import find_source_file, is_foreign, is_from_plugin, load_file, load_plugins, split_spec

T = TypeVar("T")


class Registry(dict[str, T]):
    """A table of classes or functions by name. `what` is one of them in words, such as "task".

    `modules` maps built-in names to the modules that register them. A module is imported when its name is first asked
    for. `is_open` = users can add their own.
    """

    def __init__(
        self,
        what: str,
        items: Mapping[str, T] | None = None,
        *,
        modules: Mapping[str, str] | None = None,
        is_open: bool = True,
    ) -> None:
        super().__init__(items or {})
        self.what = what
        self.modules = dict(modules or {})
        self.is_open = is_open

    def find(self, spec: str) -> T:
        """Returns what `spec` names: a built-in or registered name, one of a plugin, or `file.py:name`.

        The file of `file.py:name` is run. Plugins are imported if the name is not known. Raises ConfigError if there is
        no such file or name, and UserCodeError if the file raises.
        """
        if self.is_open and spec.endswith(".py") and expand_home(spec).is_file():
            load_file(spec)
            own = self.list_in_file(Path(spec))
            listed = ", ".join(f"{spec}:{name}" for name in own) if own else f"none, the file registers no {self.what}"
            raise ConfigError(f'"{spec}" names a file but no {self.what} in it. Write one of these: {listed}.')
        where = split_spec(spec) if self.is_open else None
        if where is None:
            return self._find_name(spec)
        path, name = where
        load_file(path)
        if name not in self:
            own = self.list_in_file(path)
            hint = suggest_name(name, own) if own else f" The file registers no {self.what}."
            raise ConfigError(
                f'there is no {self.what} "{name}" in {path}.{hint} Correct the name after the colon, or write '
                f'@cohort.{_DECORATORS.get(self.what, self.what)}("{name}") above its class in that file.'
            )
        return self[name]

    def _find_name(self, name: str) -> T:
        """Returns what a plain name stands for. Imports its module, or all plugins, if it is not known.

        Raises ConfigError if there is no such name.
        """
        if name not in self and name in self.modules:
            importlib.import_module(self.modules[name])
        failures = load_plugins() if self.is_open and name not in self else {}
        if name not in self:
            # The settings that no one can add to are chosen by flags alone; a task is also a word of its own.
            remedy = (
                "Correct the name; for one of your own write path/to/file.py:NAME, or install the package that has it."
                if self.is_open
                else f"Correct --{self.what}, or {self.what}.name in config.yaml."
            )
            raise ConfigError(
                f'unknown {self.what} "{name}".{suggest_name(name, self.list_names())} {remedy}'
                + "".join(f" {failure}" for failure in failures.values())
            )
        return self[name]

    def list_names(self) -> list[str]:
        """Returns all built-in and registered names; those of plugins only if they were imported before.

        They are in the order in which they were registered, or sorted if their modules register them when asked for.
        """
        return sorted(self.keys() | self.modules.keys()) if self.modules else list(self)

    def list_in_file(self, path: Path) -> list[str]:
        """Returns the names of what a user's file registers, if the file was loaded before."""
        file = str(expand_home(path).resolve())
        return [name for name, item in self.items() if find_source_file(item) == file]

    def is_known(self, spec: str) -> bool:
        """Returns whether `find` gives an answer without running foreign code."""
        return spec in self or spec in self.modules

    def get_name(self, item: Any) -> str | None:
        """Returns the name under which a class or function is registered; None if it is not.

        A second class made by the same definition counts as the same: a script that runs as __main__ is loaded once
        more by its path.
        """
        for name, known in self.items():
            if known is item:
                return name
        same = (name for name, known in self.items() if is_same_definition(known, item))
        return next(same, None)

    def make_spec(self, item: Any) -> str:
        """Returns the text by which `find` finds a registered class again, in this process or another.

        It is its name, or `/path/to/file.py:name` if it is in a user's file. Raises ConfigError if it is not registered
        or in no file.
        """
        name = self.get_name(item)
        if name is None:
            if self.is_open and is_foreign(item):
                mark = f'@cohort.{_DECORATORS.get(self.what, self.what)}("{item.__name__.lower()}")'
                raise ConfigError(f"the class {item.__name__} is not registered: write {mark} above it.")
            classes = ", ".join(sorted(str(getattr(known, "__name__", known)) for known in self.values()))
            raise ConfigError(
                f"{item.__name__} is not registered as a {self.what}, so --{self.what} cannot choose it. Use one of "
                f"these: {classes}."
            )
        if not is_foreign(item) or is_from_plugin(item):
            return name
        file = find_source_file(item)
        # Python gives "<stdin>" as the file of a program that it reads from a pipe.
        if not file.endswith(".py") or not Path(file).is_file():
            raise ConfigError(
                f'{self.what} "{name}" is not defined in a .py file, so no other process could find it; put its code '
                "into one and import it from there."
            )
        return f"{Path(file).resolve()}:{name}"


# The decorators whose name is not that of what they register.
_DECORATORS = {"algo": "algorithm"}


def is_same_definition(one: Any, other: Any) -> bool:
    """Returns whether two classes or functions were made by the same definition: same file (or module), same name."""
    places = [(find_source_file(code) or code.__module__, code.__qualname__) for code in (one, other)]
    return places[0] == places[1]
