"""Reward functions of other tools: functions written for TRL or verl score answers unchanged.

    class Mine:
        rewards = [brevity, right_number]     # in place of a method `score`

How a function is called follows from the names of its parameters:

    completions         TRL: f(prompts, completions, completion_ids, **columns) -> a number or None per completion
    solution_str        verl: f(data_source, solution_str, ground_truth, extra_info) -> a number, or a dict with "score"
    row, answer         Cohort: f(row, answer) -> a number

Each function is a part of the reward, under its own name. A function of TRL is called once per group of samples. Any of
them may be `async`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from cohort.errors import TaskError
from cohort.tasks.base import Task, Verdict
from cohort.tasks.grading import is_async
from cohort.types import Answer, Message, Row

Style = Literal["trl", "verl", "cohort"]
See = Literal["auto", "text", "messages"]
MAX_LOGGED = 200  # characters of what a function logs about one answer
# Columns that TRL does not hand to functions, because prompts and completions are.
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
# What TRL hands to functions besides the columns.
_TRL_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
_HELP = "a reward function takes completions (as in TRL), solution_str and ground_truth (as in verl), or row and answer"


class NoTrainerState:
    """Stands in for TRL's `trainer_state`. Its attributes cannot be read: a score depends on row and answer alone."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"a reward function reads trainer_state.{name}, which Cohort does not have: a score may depend on the row "
            "and the answer alone, so that a resumed run gets the same one"
        )


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function that gives one part of the reward, and how it is called."""

    name: str  # of the part
    function: Callable[..., Any]
    style: Style
    accepts: frozenset[str] | None  # the keywords that it takes; None = all
    required: tuple[str, ...] = ()  # columns of a row that it cannot be called without

    def find_missing_column(self, row: Mapping[str, Any]) -> str:
        """Returns the first column that the function needs and the row does not have; "" if it has all."""
        return next((name for name in self.required if name not in row), "")

    def call(self, row: Row, prompt: list[Message] | str, answers: Sequence[Answer], log: GroupLog) -> Any:
        """Calls the function for the answers of a group. Returns its results, or something that gives them if awaited.

        `prompt` is a text if the function sees texts. What it logs goes to `log`.
        """
        if self.style == "trl":
            return self.function(**self._select(_make_trl_arguments(row, prompt, answers, log)))
        calls = [self._call_alone(row, answer) for answer in answers]
        if any(inspect.isawaitable(result) for result in calls):
            return _gather(calls)
        return calls

    def _call_alone(self, row: Row, answer: Answer) -> Any:
        """Calls a function that scores one answer."""
        if self.style == "cohort":
            return self.function(row, answer)
        return self.function(**self._select(_make_verl_arguments(row, answer)))

    def _select(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns those of the arguments that the function takes."""
        if self.accepts is None:
            return arguments
        return {name: value for name, value in arguments.items() if name in self.accepts}


class GroupLog:
    """What the functions of a group log, as a text per answer, which becomes the reason of its score."""

    def __init__(self, num_answers: int) -> None:
        self.lines: list[list[str]] = [[] for _ in range(num_answers)]

    def log_metric(self, name: str, value: Any) -> None:
        """Notes a number for all answers of the group (TRL's `log_metric`)."""
        for lines in self.lines:
            lines.append(f"{name} {value}"[:MAX_LOGGED])

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Notes one value per answer (TRL's `log_extra`)."""
        for lines, value in zip(self.lines, values, strict=False):
            lines.append(f"{column} {value}"[:MAX_LOGGED])

    def make_reason(self, index: int) -> str:
        """Returns what was logged about answer number `index`."""
        return "; ".join(self.lines[index])


def read_reward_functions(name: str, functions: Any) -> tuple[RewardFunction, ...]:
    """Returns the functions that a task names as its `rewards`, with how each is called.

    `name` is the task, for messages. Raises TaskError for what is no function, for one whose parameters fit no style,
    and for two functions of the same name.
    """
    if not isinstance(functions, tuple | list) or not functions:
        raise TaskError(f'task "{name}": rewards must be a list of functions, as in rewards = [brevity]')
    found: list[RewardFunction] = []
    for number, function in enumerate(functions):
        if not callable(function):
            raise TaskError(
                f'task "{name}": rewards has {str(function)[:60]!r}, which is no function; {_HELP}. Reward models are '
                "called in a function of your own"
            )
        found.append(_read_function(name, number, function))
    names = [each.name for each in found]
    repeated = [each for each in names if names.count(each) > 1]
    if repeated:
        raise TaskError(f'task "{name}": rewards has two functions named {repeated[0]}; give each its own name')
    return tuple(found)


def _read_function(task: str, number: int, function: Callable[..., Any]) -> RewardFunction:
    """Returns one of the functions, with how it is called. `number` is its place, for a function without a name."""
    plain = function.func if isinstance(function, partial) else function
    # An object with a method __call__ is named by its class, as in TRL.
    name = getattr(plain, "__name__", type(plain).__name__)
    if not name.isidentifier():
        name = f"reward_{number + 1}"
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise TaskError(f'task "{task}": the parameters of the reward function {name} are not known; {_HELP}') from None
    takes_all = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    words = [n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    style: Style
    if "solution_str" in words:
        style = "verl"
    elif len(words) >= 2 and words[0] == "row":
        style = "cohort"
    elif takes_all or "completions" in words:
        # TRL gives every function more than it needs, so each takes **kwargs, and names only what it reads.
        style = "trl"
    else:
        raise TaskError(
            f'task "{task}": the reward function {name} takes ({", ".join(words) or "nothing"}), which fits no kind; '
            f"{_HELP}"
        )
    needed = [n for n in words if parameters[n].default is inspect.Parameter.empty]
    # Functions for verl are given None for a column that the rows do not have.
    required = tuple(n for n in needed if n not in _TRL_ARGUMENTS) if style == "trl" else ()
    return RewardFunction(name, function, style, None if takes_all else frozenset(words), required)


def _make_trl_arguments(
    row: Row, prompt: list[Message] | str, answers: Sequence[Answer], log: GroupLog
) -> dict[str, Any]:
    """Returns the arguments with which TRL calls a reward function, for the answers of one group."""
    completions: list[Any]
    if isinstance(prompt, str):
        completions = [answer.text for answer in answers]
    else:
        # TRL puts the beginning that the assistant was made to continue in front of the completion.
        if prompt and prompt[-1]["role"] == "assistant":
            prompt = prompt[:-1]
        completions = [[{"role": "assistant", "content": answer.full}] for answer in answers]
    num = len(answers)
    columns = {name: [value] * num for name, value in row.items() if name not in _NOT_COLUMNS}
    return columns | {
        "prompts": [prompt] * num,
        "completions": completions,
        "completion_ids": [list(answer.tokens) for answer in answers],
        "trainer_state": NoTrainerState(),
        "log_metric": log.log_metric,
        "log_extra": log.log_extra,
    }


def _make_verl_arguments(row: Row, answer: Answer) -> dict[str, Any]:
    """Returns the arguments with which verl calls `compute_score`, from the columns that verl's rows have."""
    model = row.get("reward_model")
    truth = row["ground_truth"] if "ground_truth" in row else model["ground_truth"] if isinstance(model, dict) else None
    return {
        "data_source": row.get("data_source", ""),
        "solution_str": answer.text,
        "ground_truth": truth,
        "extra_info": row.get("extra_info"),
    }


async def _gather(results: Sequence[Any]) -> list[Any]:
    """Returns the results in their order; those that can be awaited are waited for, all at once."""
    waiting = [result if inspect.isawaitable(result) else _return(result) for result in results]
    return list(await asyncio.gather(*waiting))


async def _return(value: Any) -> Any:
    """Returns the value."""
    return value


def score_with_functions(
    task: Task, functions: Sequence[RewardFunction], row: Row, prompt: list[Message] | str, answers: Sequence[Answer]
) -> list[Verdict] | Awaitable[list[Verdict]]:
    """Returns a verdict per answer of a group, with one part per function; None = it does not apply to the answer.

    If a function gives something to be awaited, so does this: such functions then run at once. All others have run
    when this returns, outside of an event loop if the caller has none: they may start one of their own. Raises
    TaskError if a function does not give one number per answer, or needs a column that the row does not have.
    """
    for each in functions:
        if missing := each.find_missing_column(row):
            raise TaskError(
                f'task "{task.name}", row "{row.get("id", "?")}": the reward function {each.name} needs the column '
                f'"{missing}"; the row has {", ".join(row)}. Add it to the rows, or correct the parameter\'s name'
            )
    log = GroupLog(len(answers))
    called = [each.call(row, prompt, answers, log) for each in functions]

    async def finish() -> list[Verdict]:
        """Waits for the functions that are coroutines."""
        return _make_verdicts(task, functions, row, await _gather(called), log)

    if any(inspect.isawaitable(result) for result in called):
        return finish()
    return _make_verdicts(task, functions, row, called, log)


def _make_verdicts(
    task: Task, functions: Sequence[RewardFunction], row: Row, results: Sequence[Any], logs: GroupLog
) -> list[Verdict]:
    """Returns a verdict per answer, from what each function returned. Raises TaskError for what are no numbers."""
    num_answers = len(logs.lines)
    where = f'task "{task.name}", row "{row.get("id", "?")}": the reward function'
    columns: dict[str, list[float | None]] = {}
    for each, result in zip(functions, results, strict=True):
        values = _list_values(result)
        if values is None:
            raise TaskError(f"{where} {each.name} returned a {type(result).__name__}; return a list of numbers")
        if len(values) != num_answers:
            raise TaskError(f"{where} {each.name} returned {len(values)} numbers for {num_answers} answers")
        columns[each.name] = [_read_score(value, each, logs, index) for index, value in enumerate(values)]
        wrong = [value for value in columns[each.name] if value is not None and not _is_finite(value)]
        if wrong:
            raise TaskError(
                f"{where} {each.name} returned {str(wrong[0])[:60]!r} for an answer; return a finite number"
            )
        if each.name == task.accuracy:
            _require_accuracies(where, each.name, columns[each.name], "accuracy_part" in vars(type(task)))
    return [
        Verdict({name: values[index] for name, values in columns.items()}, logs.make_reason(index))
        for index in range(num_answers)
    ]


def _require_accuracies(where: str, name: str, values: Sequence[Any], is_flag: bool) -> None:
    """Raises TaskError unless all numbers of the function that gives the accuracy are 0 or 1.

    `is_flag` = a setting names the function, not a class. `where` begins the message.
    """
    wrong = [value for value in values if value not in (0, 1)]
    if wrong:
        named = "--task.accuracy-part" if is_flag else "accuracy in the class"
        raise TaskError(
            f"{where} {name} returned {str(wrong[0])[:60]}, but {named} names it: an accuracy is 0 or 1 for every "
            f"answer. Return 0 or 1, or remove {named}: then the mean reward is measured"
        )


def _list_values(result: Any) -> list[Any] | None:
    """Returns the values in a list, an array of numpy or torch, or anything else to iterate over; None if it is not."""
    to_list = getattr(result, "tolist", None)
    values = to_list() if callable(to_list) else result
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        return None
    return list(values)


def _read_score(value: Any, function: RewardFunction, log: GroupLog, index: int) -> Any:
    """Returns the number in what a function gave for one answer: verl's may be a dict with "score" and more."""
    if isinstance(value, Mapping) and "score" in value:
        more = [f"{name} {number}"[:MAX_LOGGED] for name, number in value.items() if name != "score"]
        log.lines[index] += more
        value = value["score"]
    # TRL itself marks a function that does not apply by NaN.
    return None if function.style == "trl" and _is_nan(value) else value


def _is_finite(value: Any) -> bool:
    """Returns whether a value is a finite number, also one of numpy or torch."""
    try:
        return not isinstance(value, str) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _is_nan(value: Any) -> bool:
    """Returns whether a value is NaN, also as a number of numpy or torch."""
    try:
        return math.isnan(value)
    except (TypeError, ValueError, OverflowError):
        return False


def add_reward_functions(cls: type, name: str) -> None:
    """Gives a task class with `rewards` its parts and the method `score_group`.

    The class may have `completions = "text"` or "messages": how functions of TRL see prompts and completions. "auto" is
    as in TRL: texts if the prompt is a text, else messages. Raises TaskError for functions that cannot be called, and
    for a class that has a method to score too.
    """
    for method in ("score", "score_group"):
        # A class may be registered twice; the method that was made here is none of its own.
        if getattr(cls.__dict__.get(method), "__module__", __name__) != __name__:
            raise TaskError(f'task "{name}" has rewards and a method {method}, which both score; keep one of them')
    functions = read_reward_functions(name, cls.__dict__.get("rewards", getattr(cls, "rewards", ())))
    see: See = getattr(cls, "completions", "auto")
    if see not in ("auto", "text", "messages"):
        raise TaskError(f'task "{name}": completions is {see!r}; it must be "auto", "text" or "messages"')
    settings: dict[str, Any] = {
        "parts": tuple(each.name for each in functions),
        "accuracy": getattr(cls, "accuracy", None),
        "optional_parts": True,
        "service": getattr(cls, "service", any(is_async(each.function) for each in functions)),
        "score_group": make_score_group(functions, see),
    }
    for key, value in settings.items():
        setattr(cls, key, value)


def make_score_group(functions: Sequence[RewardFunction], see: See) -> Callable[..., Any]:
    """Returns a method `score_group(self, row, answers)` that calls the functions.

    It is a coroutine if any of them is one.
    """

    def choose_prompt(self: Any, row: Row) -> list[Message] | str:
        """Returns the prompt as the functions see it."""
        prompt: list[Message] | str = self.prompt(row)
        if see == "text" and not isinstance(prompt, str):
            return "\n".join(str(message.get("content") or "") for message in prompt)
        if see == "messages" and isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        return prompt

    def score_now(self: Any, row: Row, answers: list[Answer]) -> list[Verdict] | Awaitable[list[Verdict]]:
        """Scores the answers of a group with the task's reward functions."""
        return score_with_functions(self, functions, row, choose_prompt(self, row), answers)

    async def score_async(self: Any, row: Row, answers: list[Answer]) -> list[Verdict]:
        """Scores the answers of a group with the task's reward functions, of which some are coroutines."""
        scored = score_now(self, row, answers)
        return await scored if inspect.isawaitable(scored) else scored

    return score_async if any(is_async(each.function) for each in functions) else score_now
