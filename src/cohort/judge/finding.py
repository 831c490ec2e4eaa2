"""Finds the judges of a task, before anything is asked: to rehearse them, and to know which keys they need."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from cohort.judge.judge import Judge
from cohort.tasks.base import list_own_tasks


def find_judges(task: object) -> list[Judge]:
    """Returns the judges that a task uses: in its settings, in its class, and in variables that its functions name.

    Its functions are its methods and its reward functions. Such a variable is one of the module or of a function around
    the class. Equal judges are returned once. Of a mixture, these are the judges of all tasks.
    """
    found: list[Judge] = []
    for own in list_own_tasks(task):
        # Read without running properties, which are foreign code.
        names = [*getattr(own, "__dict__", {}), *dir(type(own))]
        values = [inspect.getattr_static(own, name, None) for name in names]
        if hasattr(own, "load_functions"):
            values += own.load_functions()
        found += [one for value in values for one in _list_values(value) if isinstance(one, Judge)]
    return [judge for n, judge in enumerate(found) if judge not in found[:n]]


def _list_values(value: Any) -> Iterator[Any]:
    """Yields a value or, of functions and lists of functions, the values that these name."""
    for each in value if isinstance(value, tuple | list) else (value,):
        plain = each.func if isinstance(each, partial) else each
        if isinstance(plain, FunctionType):
            yield from _list_named_values(plain)
        else:
            yield plain


def _list_named_values(function: FunctionType) -> Iterator[Any]:
    """Yields the values of global variables and of the closure that a function names, also in functions inside it."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # The variable is assigned later.
            continue
    codes: list[CodeType] = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield from (function.__globals__.get(name) for name in code.co_names)
