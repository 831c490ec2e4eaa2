"""The definition of a task: rows, a prompt for each row, and a score for an answer.

A task is a class decorated with `@cohort.task("name")`. The decorator makes it a frozen dataclass whose fields are
its settings. An instance therefore describes completely which data it makes, and can be compared and printed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Protocol, TypeVar, dataclass_transform

from cohort.errors import TaskError
from cohort.registry import Registry, is_same_definition
from cohort.tasks.calls import iterate_rows, quote_id
from cohort.tasks.formats import has_half_character
from cohort.tasks.parts import NO_PART, check_parts, get_declared, is_computed, read_part_rules
from cohort.types import Answer, Message, Outcome, Row
from cohort.user_code import describe_result, report_errors

T = TypeVar("T")

MAX_REASON = 500  # characters of a grader's reason that are kept
DEFAULT_MAX_TOKENS = 256  # `max_tokens` of a task that does not set it
OVER_LIMIT = "over the grader's work limit"  # the reason for an answer that takes too much work to check
# Built-in tasks by name, with the modules that register them. A module is imported when its task is first asked for.
BUILT_IN = {
    "aime24": "cohort.tasks.mathematics.task",
    "amc": "cohort.tasks.mathematics.task",
    "arithmetic": "cohort.tasks.arithmetic",
    "calculator": "cohort.tasks.calculator",
    "code": "cohort.tasks.code.task",
    "countdown": "cohort.tasks.countdown",
    "gsm8k": "cohort.tasks.gsm8k",
    "ifeval": "cohort.tasks.ifeval.task",
    "math12k": "cohort.tasks.mathematics.task",
    "math500": "cohort.tasks.mathematics.task",
    "minerva": "cohort.tasks.mathematics.task",
    "mix": "cohort.tasks.mix",
    "olympiad": "cohort.tasks.mathematics.task",
    "reasoning_gym": "cohort.tasks.reasoning_gym.task",
    "rows": "cohort.tasks.rows",
    "search_qa": "cohort.tasks.search.task",
    "textarena": "cohort.tasks.textarena",
}

# What the rows of a split are needed for, in messages.
_NEEDED_FOR = {
    "train": ", which a run trains on",
    "test": ", so there is nothing to evaluate; --split validation (of a run: --eval.split validation) cuts some from "
    "its training rows",
}
# The methods that Cohort calls, with their arguments after self. All but `rows` and `prompt` are optional.
_METHODS = {
    "rows": ("split",),
    "prompt": ("row",),
    "score": ("row", "answer"),
    "score_group": ("row", "answers"),
    "gold": ("row",),
    "summary": ("rows", "parts"),
    "environment": (),
}
MAX_ROWS = 5_000_000  # rows of a split; a task with more is taken for one whose rows never end

TASKS: Registry[type] = Registry("task", modules=BUILT_IN)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Reward parts by name, with the grader's reason for them. `score` returns this or a bare dict of parts.

    `parts` is a dict of numbers by part, where None = the part does not apply, or the number of the only part.
    """

    parts: Any
    reason: str = ""


class Task(Protocol):
    """The attributes and methods that every class has after `@cohort.task`.

    A class may also have `gold(row) -> str`, a right answer as text: the self-check scores it. In place of `score` it
    may have `score_group(row, answers)`, which scores the answers of a group together, or `rewards`, a list of
    functions in the style of TRL, verl or Cohort (`cohort.tasks.rewards`). Graders may be `async`. For conversations
    it has
    `tools`, functions that the model may call, or `environment()`, a new object per episode, or both: see
    `cohort.tasks.conversation`. A task with an environment needs no `prompt` and no `score`.

    A class whose settings depend on some of them has `choose_class(settings)` and `choose(settings)`: see the functions
    `choose_class` and `choose_task`.
    `coefficients` has the coefficients of parts that are not 1 by default.
    """

    name: ClassVar[str]
    accuracy: ClassVar[str | None]  # the part, 0 or 1, that evaluation reports; None = it reports the mean reward
    parts: ClassVar[tuple[str, ...]]  # every part `score` returns, no more and no fewer
    optional_parts: ClassVar[bool]  # whether `score` may give None for a part that does not apply to an answer
    work_seconds: ClassVar[float]
    """CPU seconds that the grader may spend on an answer. An answer that takes longer, or that makes the grader run out
    of memory, counts as wrong. For graders whose work depends on the answer. 0 = a grader that takes too long has
    failed, and its answer gets no score."""
    service: ClassVar[bool]
    """Whether the grader asks an outside service, such as a judge. Many answers are then scored at once, a time-out or
    an exception is a failure that is tried again, and outcomes are kept in the run's journal. It is True if the grader
    is declared with `async def`, unless the class says otherwise."""
    needs_sandbox: ClassVar[bool]  # whether the grader runs programs of the model, which must not see keys
    max_tokens: ClassVar[int]  # limit of a completion's tokens in evaluations that do not set one
    packages: ClassVar[Mapping[str, str]]
    """Modules that the grader needs beyond Cohort's own dependencies, each with what `pip install` is told. A scoring
    pool checks that they are installed; its workers import them before they take answers."""

    def rows(self, split: str) -> Iterable[Row]:
        """Returns the rows of a split ("train" or "test"), always the same rows in the same order."""

    def prompt(self, row: Row) -> list[Message]:
        """Returns the messages that the model is shown for a row.

        A final assistant message is one that the model continues.
        """

    def score(self, row: Row, answer: Answer) -> Mapping[str, float | None] | float | Verdict:
        """Returns the reward's parts for an answer, by name; of a task with one part, its number will do.

        A wrong answer gets low parts; an exception is a bug in the grader.
        """


@dataclass_transform(frozen_default=True, kw_only_default=True)
def task(name: str) -> Callable[[type[T]], type[T]]:
    """Returns a decorator that checks a class and registers it as the task `name`.

    The class becomes a frozen dataclass, unless it is one already, with the attributes of `Task`. TaskError is raised
    for a name that is not allowed or that another class has, and for a class that cannot be a task. The same definition
    may be registered again.

    >>> @task("echo")
    ... class Echo:
    ...     word: str = "group"
    ...     def rows(self, split): yield {"word": self.word}
    ...     def prompt(self, row): return [{"role": "user", "content": row["word"]}]
    ...     def score(self, row, answer): return {"correct": float(answer.text == row["word"])}
    >>> get_task("echo")(word="cohort").accuracy
    'correct'
    """
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
        raise TaskError(
            f'task name "{name}" is not allowed; use lower-case letters, digits, "_" and "-", beginning with a letter'
        )

    def register(cls: type[T]) -> type[T]:
        """Checks the class, sets the attributes of `Task` on it, enters it in the registry, and returns it.

        A class that is no dataclass is made one. Raises TaskError for a class that cannot be a task, and for a name
        that is taken.
        """
        # A class that makes functions a setting calls them itself.
        if hasattr(cls, "rewards") and "rewards" not in inspect.get_annotations(cls):
            # Imported here, because that module needs this one.
            importlib.import_module("cohort.tasks.rewards").add_reward_functions(cls, name)
        # An environment may bring the first messages and the reward itself.
        needed = ("rows",) if hasattr(cls, "environment") else ("rows", "prompt")
        has_score = any(hasattr(cls, method) for method in ("score", "score_group", "environment"))
        for method in needed if has_score else (*needed, "score"):
            if not callable(getattr(cls, method, None)):
                raise TaskError(f'task "{name}": class {cls.__name__} has no method {method}; define it in the class')
        if not dataclasses.is_dataclass(cls):
            cls = dataclass(frozen=True, kw_only=True)(cls)
        elif not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise TaskError(
                f'task "{name}": the dataclass {cls.__name__} is not frozen; write @dataclass(frozen=True) on the '
                "class or parent class that has @dataclass"
            )
        rules = read_part_rules(name, cls)
        work_seconds = get_declared(cls, "work_seconds", 0.0)
        packages = dict(get_declared(cls, "packages", {}))
        if not isinstance(work_seconds, int | float) or not 0 <= work_seconds < math.inf:
            raise TaskError(
                f'task "{name}": work_seconds is {work_seconds!r}; it must be a finite number of seconds, 0 or more'
            )
        attributes: dict[str, Any] = {"name": name}
        attributes |= {"accuracy": rules.accuracy, "parts": rules.parts, "optional_parts": rules.optional}
        max_tokens = get_declared(cls, "max_tokens", DEFAULT_MAX_TOKENS)
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise TaskError(f'task "{name}": max_tokens is {max_tokens!r}; it must be a whole number of at least 1')
        attributes |= {"work_seconds": float(work_seconds), "packages": packages, "max_tokens": max_tokens}
        needs_sandbox = bool(get_declared(cls, "needs_sandbox", False))
        attributes |= {"service": _read_service(name, cls), "needs_sandbox": needs_sandbox}
        for key, value in attributes.items():
            # A property computes it from the settings of each task.
            if not is_computed(cls, key):
                setattr(cls, key, value)
        # The same definition may be registered again, as when a script that runs as __main__ is loaded once more by its
        # path. Another class of the same name is refused, also where a built-in task has it and is not imported yet.
        known = TASKS.get(name)
        is_taken = name in BUILT_IN and cls.__module__ != BUILT_IN[name]
        if is_taken or (known is not None and not is_same_definition(known, cls)):
            raise TaskError(f'another class is already registered as task "{name}"; give @task another name')
        for method, words in _METHODS.items():
            _check_signature(name, cls, method, words)
        TASKS[name] = cls
        return cls

    return register


def _read_service(name: str, cls: type) -> bool:
    """Returns whether a task's grader asks an outside service: what its class says, or whether it is a coroutine.

    Raises TaskError if the class also has `work_seconds`: a time-out is then a failure and a wrong answer.
    """
    graders = [getattr(cls, method, None) for method in ("score", "score_group")]
    service = get_declared(cls, "service", any(inspect.iscoroutinefunction(grader) for grader in graders))
    if not isinstance(service, bool):
        raise TaskError(f'task "{name}": service is {service!r}; it must be True or False')
    work_seconds: Any = get_declared(cls, "work_seconds", 0.0)
    if service and work_seconds:
        raise TaskError(
            f'task "{name}" has work_seconds, so that an answer over the limit is wrong, and asks an outside service, '
            "whose time-out is a failure; leave work_seconds out, or set service = False in the class"
        )
    return service


def _check_signature(name: str, cls: type, method: str, words: tuple[str, ...]) -> None:
    """Raises TaskError if the class has the method and it cannot be called with the arguments `words`."""
    function = getattr(cls, method, None)
    if not callable(function):
        return
    try:
        inspect.signature(function).bind(None, *words)
    except TypeError as error:
        raise TaskError(
            f'task "{name}": {cls.__name__}.{method} is called with {len(words)} arguments ({error}); write def '
            f"{method}(self, {', '.join(words)})"
        ) from None
    except ValueError:
        # Some callables have no signature that Python knows.
        return


def make_with_defaults(cls: type[T]) -> T:
    """Returns a task with the default of every setting.

    Raises TaskError if a setting has no default, and UserCodeError if the class of a user raises.
    """
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.default is field.default_factory is dataclasses.MISSING:
            raise TaskError(
                f'task "{cls.name}": its setting {field.name} has no default, so the task cannot be chosen by its name;'  # type: ignore[attr-defined]
                f" give it one in the class {cls.__name__}, as in {field.name}: int = 1"
            )
    with report_errors(f'the class {cls.__name__} of the task "{cls.name}"', cls):  # type: ignore[attr-defined]
        return cls()


def choose_class(cls: type, settings: Mapping[str, Any]) -> type:
    """Returns the class that the settings of a task choose: `cls` itself for almost all tasks.

    A task may have fields that depend on other settings, such as those of a chosen data set. It has then a class method
    `choose_class(settings)`, which returns a subclass with these fields, always the same one for the same settings.
    `settings` are values, or texts of a command line, and may be incomplete or wrong.
    """
    chooser = getattr(cls, "choose_class", None)
    return cls if chooser is None else chooser(settings)


def choose_task(task: Any, settings: Mapping[str, Any]) -> Any:
    """Returns a task with the fields that `settings`, changes of its settings, choose; the task itself if it has them.

    A task with the class method `choose_class` has a method `choose(settings)` for it. A new task has the settings that
    chose its class, keeps those that do not depend on them, and has the defaults of all others.
    """
    chooser = getattr(task, "choose", None)
    return task if chooser is None else chooser(settings)


def get_task(name: str) -> type:
    """Returns the task class registered under `name`; its constructor takes the settings.

    Imports the module of a built-in task, or the plugins, first if needed. Raises ConfigError, with the nearest known
    name, if there is no such task.
    """
    return TASKS.find(name)


def list_task_names() -> list[str]:
    """Returns the names of all built-in and registered tasks, sorted."""
    return TASKS.list_names()


def has_conversations(task: Any) -> bool:
    """Returns whether a task has tools or an environment, so that an episode may have several turns."""
    # A mixture has those of its tasks.
    return any(hasattr(own, "environment") or bool(getattr(own, "tools", ())) for own in list_own_tasks(task))


def list_own_tasks(task: Any) -> tuple[Any, ...]:
    """Returns the tasks that a mixture consists of; any other task alone. Those in files of users are loaded."""
    return tuple(task.own_tasks.values()) if hasattr(task, "for_row") else (task,)


def require(task: str, holds: bool, rule: str) -> None:
    """Raises TaskError, with the task's name and `rule`, unless `holds`. Tasks check their settings with it.

    `rule` continues "it needs", as in "a tolerance below 1, not 2".
    """
    if not holds:
        raise TaskError(
            f'task "{task}" has a setting that is not allowed: it needs {rule}. Correct that setting in '
            "the recipe or script, or with its flag (--task.SETTING)"
        )


def check_packages(task: Task) -> None:
    """Raises TaskError if a package that the task's grader needs is not installed. Imports none of them."""
    for module, source in task.packages.items():
        if importlib.util.find_spec(module) is None:
            raise TaskError(
                f"scoring {task.name} needs the module {module}, which is not installed; run pip install '{source}'"
            )


def load_rows(task: Task, split: str, limit: int = 0, may_be_empty: bool = False) -> list[Row]:
    """Returns the rows of a split as plain JSON values, each with an `id`, a string that no other row has.

    At most the first `limit` rows are read; 0 = all. A row without an id gets a hash of its content, so that the id
    stays when the data are reordered. Raises TaskError for two rows with the same id (equal rows without one included),
    for a row that is no dict of JSON values, for a split without rows unless it `may_be_empty`, and for one with more
    than MAX_ROWS. Raises UserCodeError if the `rows` of a user's task raises.
    """
    rows: list[Row] = []
    first_index: dict[str, int] = {}
    for index, raw in enumerate(islice(iterate_rows(task, split), limit or None)):
        row = normalise_row(task.name, index, raw)
        if row["id"] in first_index:
            raise TaskError(
                f'task "{task.name}": rows {first_index[row["id"]]} and {index} (counted from 0) of "{split}" have the '
                f'same id "{row["id"]}"; remove the repeated row or give each its own id'
            )
        if index >= MAX_ROWS:
            raise TaskError(
                f'task "{task.name}": its method `rows` gives more than {MAX_ROWS} rows for "{split}"; let it end, for '
                "example after a number of rows that is a setting"
            )
        first_index[row["id"]] = index
        rows.append(row)
    if not rows and not may_be_empty:
        raise TaskError(
            f'task "{task.name}" has no rows for the split "{split}"{_NEEDED_FOR.get(split, "")}. Give it some: in its '
            f'method `rows`, which is called with "{split}", or in the data that its settings name'
        )
    return rows


def has_rows(task: Task, split: str) -> bool:
    """Returns whether a task has at least one row for a split. Raises what `load_rows` raises for the first row."""
    return bool(load_rows(task, split, limit=1, may_be_empty=True))


def normalise_row(name: str, index: int, raw: Any) -> Row:
    """Returns a raw row as a new dict of plain JSON values, with a string `id` as its first field.

    Without an id, or with None, a hash of the row is its id. `name` is the task and `index` the row's number, for error
    messages. Raises TaskError if `raw` is not a dict, cannot be written as JSON or as text, or has an id that is
    neither an int nor a text that is not empty.
    """
    if not isinstance(raw, Mapping):
        raise TaskError(f'task "{name}": row {index} is a {type(raw).__name__}; its method `rows` must yield dicts')
    try:
        # Scoring workers get rows as JSON. The row goes through JSON here too, so that `prompt` sees what `score` sees.
        text = json.dumps(dict(raw))
        row: Row = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(
            f'task "{name}": row {index} (counted from 0) cannot be written as JSON ({error}); in its method `rows`, '
            "use only strings, numbers, booleans, None, lists, and dicts with strings as keys"
        ) from error
    identity = row.get("id")
    if has_half_character(text):
        raise TaskError(
            f'task "{name}": row {index} (counted from 0, id {quote_id(identity)}) contains half a character (a lone '
            "surrogate), which cannot be written as text; remove it"
        )
    if identity is None:
        identity = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]
    elif isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise TaskError(f'task "{name}": row {index} has the id {identity!r}; use a non-empty string, an int or no id')
    return {"id": str(identity), **{k: v for k, v in row.items() if k != "id"}}


def make_outcome(task: Task, row: Row, scored: Any) -> Outcome:
    """Returns what a grader returned for an answer as an outcome: its parts and its reason.

    `scored` is a Verdict, a dict of parts or, if the task has one part, a number. If no part applies to the answer, the
    outcome is a failure. Raises TaskError if the parts are not valid.
    """
    verdict = scored if isinstance(scored, Verdict) else Verdict(scored)
    # Who lets parts be None may write None for the only one.
    if verdict.parts is None and not (task.optional_parts and len(task.parts) == 1 and task.accuracy is None):
        raise TaskError(
            f'task "{task.name}", row "{row.get("id", "?")}": the method `score` returned '
            f"{describe_result(None, getattr(type(task), 'score', None))}; return a dict of parts, or Verdict(dict)"
        )
    given = {} if verdict.parts is None else verdict.parts
    parts = check_parts(task.name, str(row.get("id", "?")), task.parts, task.accuracy, given, task.optional_parts)
    return Outcome(parts=parts, reason=str(verdict.reason), failure="" if parts else NO_PART)


def make_plain_answer(text: str) -> Answer:
    """Returns an answer that consists of `text` alone and ended by itself, for self-checks, gold answers and tests.

    Its number of tokens is the number of words, and its conversation is empty.
    """
    return Answer(text=text, full=text, finish="stop", num_tokens=len(text.split()), conversation=[])
