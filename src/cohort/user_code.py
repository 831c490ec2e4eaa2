"""Foreign code: files of users and installed plugins. It is imported here, and its exceptions are shown as its own.

A plugin is an installed package with an entry point in the group `cohort.plugins`. The entry point names a module whose
import registers tasks, recipes and algorithms. Plugins are imported only when a name is not found among the known ones,
or when all names are listed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from cohort.errors import CohortError, ConfigError, UserCodeError, shorten_text, suggest_name
from cohort.system.paths import expand_home
from cohort.system.secrets import remove_hidden

PLUGIN_GROUP = "cohort.plugins"

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parent
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
# Entry points of plugins that were imported or could not be: their values with the failure, "" if there was none.
_tried_plugins: dict[str, str] = {}


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
        raise ConfigError(f'"{spec}" names a file but no function or class in it; write {spec}:NAME with its name.')
    return None


def load_file(path: str | Path) -> ModuleType:
    """Runs a user's Python file, unless it was loaded before, and returns its module.

    The file's folder is appended to `sys.path`, so that the file can import its neighbours. A file that runs as
    __main__ is run again. Raises ConfigError if there is no such Python file, and UserCodeError if it raises; then
    the next call runs it again.
    """
    file = expand_home(path).resolve()
    if not file.is_file():
        raise ConfigError(f'there is no file "{path}"; put it back, or correct the path before the colon.')
    # The file may have been imported under another name: then that module is the one to return. A script that runs as
    # __main__ is loaded again, under a name of its own.
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(file) and module.__name__ != "__main__":
            return module
    name = f"cohort_user_{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f'"{path}" is not a Python file; name a file that ends in .py.')
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with report_errors(f"the file {file}", file=str(file)):
            spec.loader.exec_module(module)
    except BaseException:
        # A half-executed module must not be found by the next call.
        del sys.modules[name]
        raise
    return module


def get_function(module: ModuleType, name: str, path: str | Path) -> Callable[..., Any]:
    """Returns the function `name`, or anything that can be called, of a user's file. `path` is the file, for messages.

    Raises ConfigError, with the nearest name, if there is none.
    """
    found = vars(module).get(name)
    if callable(found):
        return found
    own = list_functions(module)
    suggestion = suggest_name(name, own) if own else " The file defines no function."
    raise ConfigError(
        f'there is no function "{name}" in {path}.{suggestion} Correct the name after the colon, or define the '
        "function in that file."
    )


def list_functions(module: ModuleType) -> list[str]:
    """Returns the names of the functions that a user's file defines, without those that it imports or names with _."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def load_function(spec: str) -> Callable[..., Any]:
    """Returns the function that a setting names as `file.py:function`. The file is run.

    Raises ConfigError if it names no function of a file, and UserCodeError if the file raises.
    """
    where = split_spec(spec)
    if where is None:
        raise ConfigError(f'"{spec}" names no function of a file; write path/to/file.py:FUNCTION.')
    path, name = where
    return get_function(load_file(path), name, path)


def make_function_spec(function: Any) -> str:
    """Returns `/path/to/file.py:name`, by which `load_function` finds a function of a user's file in another process.

    Raises ConfigError for a function that is not at the top level of a .py file.
    """
    file, name = find_source_file(function), getattr(function, "__qualname__", repr(function))
    if not file.endswith(".py") or not Path(file).is_file() or not name.isidentifier():
        raise ConfigError(
            f"the function {name} is not at the top level of a .py file, so no other process could find it; define it "
            "there with def."
        )
    return f"{Path(file).resolve()}:{name}"


def make_spec_absolute(spec: str) -> str:
    """Returns `file.py:name` with the absolute path of the file, and any other text unchanged.

    A run may be resumed from another working directory, where a relative path would name another file.
    """
    where = split_spec(spec)
    return f"{expand_home(where[0]).resolve()}:{where[1]}" if where else spec


def load_plugins() -> dict[str, str]:
    """Imports the module of every installed plugin that was not tried before.

    Returns the failures so far: entry points that could not be imported, each with the reason. Each failure is also
    logged, once.
    """
    for point in importlib.metadata.entry_points(group=PLUGIN_GROUP):
        if point.value in _tried_plugins:
            continue
        _tried_plugins[point.value] = ""
        try:
            with report_errors(f"the plugin {point.name} ({point.value})"):
                importlib.import_module(point.module)
        except CohortError as error:
            _tried_plugins[point.value] = str(error)
            log.warning("the names of a plugin are missing: %s", error)
    return {value: failure for value, failure in _tried_plugins.items() if failure}


def is_foreign(code: Any) -> bool:
    """Returns whether a class or function is defined outside of Cohort."""
    return _get_top_package(code) != "cohort"


def is_from_plugin(code: Any) -> bool:
    """Returns whether a class or function is defined in the package of an installed plugin."""
    top = _get_top_package(code)
    return any(point.module.partition(".")[0] == top for point in importlib.metadata.entry_points(group=PLUGIN_GROUP))


def _get_top_package(code: Any) -> str:
    """Returns the first word of the name of the module that defines a class or function; "" if it is not known."""
    return str(getattr(code, "__module__", None) or "").partition(".")[0]


def find_source_file(code: Any) -> str:
    """Returns the path of the file of the module that defines a class or function, or "" if there is none."""
    return getattr(sys.modules.get(getattr(code, "__module__", "")), "__file__", None) or ""


@contextmanager
def report_errors(
    what: str, code: Any = None, file: str = "", passing: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Turns an exception of foreign code inside the block into a UserCodeError that shows file, line and source.

    `what` begins the message, such as "the method rows of the task reverse". `code` is the function or class that runs:
    if it is Cohort's own, exceptions pass through, because they are bugs of Cohort. `file` is the file that runs, if it
    is not that of `code`. A CohortError, KeyboardInterrupt and the exceptions in `passing` pass through.
    """
    if code is not None and not is_foreign(code):
        yield
        return
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, (CohortError, *passing)):
            raise
        raise make_user_error(what, error, code, file) from error


def make_user_error(what: str, error: BaseException, code: Any = None, file: str = "") -> UserCodeError:
    """Returns the error that shows `error`, an exception of foreign code. The parameters are those of `report_errors`.

    It does not raise it.
    """
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}, line {error.lineno or 1}"
        source = (error.text or "").strip()
        return UserCodeError(
            f"{place} is not valid Python: {error.msg}; correct the file.", [f"  {source}"] * bool(source)
        )
    # A file that reads a key may have it in its message. Removed before the message is cut.
    said = remove_hidden(str(error))
    raised = f"{type(error).__name__}: {shorten_text(said)}" if said else type(error).__name__
    lines = describe_place(error, code, file)
    return UserCodeError(f"{what} raised {raised}. Correct {'it here:' if lines else 'its code.'}", lines)


def describe_result(value: Any, code: Any) -> str:
    """Returns what the function `code` of a user returned, for messages: its type. None gets a question and a place.

    >>> describe_result("x", print), describe_result(None, print)
    ('a str', 'None (is `return` missing?)')
    """
    if value is not None:
        return f"a {type(value).__name__}"
    source = getattr(code, "__code__", None)
    place = f" {source.co_filename}, line {source.co_firstlineno}" if source else ""
    return f"None (is `return` missing?{place})"


def describe_place(error: BaseException, code: Any = None, file: str = "") -> list[str]:
    """Returns lines that show where foreign code raised `error`: file, line and function, then the source line.

    It is the place that `find_frame` finds, or else where `code` is defined. Empty if nothing is known.
    """
    frame = find_frame(error, code, file)
    if frame is not None:
        return [
            f"  {frame.filename}, line {frame.lineno}, in {frame.name}",
            *([f"    {frame.line}"] * bool(frame.line)),
        ]
    try:
        source, number = inspect.getsourcelines(code)
        return [f"  {inspect.getsourcefile(code)}, line {number}", f"    {source[0].strip()}"]
    except (OSError, TypeError):
        return []


def find_frame(error: BaseException, code: Any = None, file: str = "") -> traceback.FrameSummary | None:
    """Returns the innermost place in foreign code on the way to an exception; None if it was in none.

    It is the innermost one in the file of `code` or in `file`, or else the innermost one outside of Cohort, the
    standard library and installed packages.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = {file, find_source_file(code)} - {""}
    found = [frame for frame in frames if frame.filename in own] or [f for f in frames if _is_users(f.filename)]
    return found[-1] if found else None


def _is_users(filename: str) -> bool:
    """Returns whether a file is a user's: not of Cohort, the standard library or an installed package."""
    path = Path(filename)
    if "site-packages" in path.parts or path.is_relative_to(_PACKAGE):
        return False
    return not any(path.is_relative_to(folder) for folder in _STANDARD if folder)
