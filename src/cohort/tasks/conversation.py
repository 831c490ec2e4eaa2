"""Conversations with tools and environments of users: what a task offers, played one turn of the policy at a time.

A task takes part in conversations if it has `tools` (typed functions; `score` then closes the episode), or a method
`environment()` that returns a new object per episode, or both. Calls of tools are run and answered here. A message
without a call goes to the environment, or, if there is none, ends the episode and is scored.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from cohort.errors import TaskError
from cohort.tasks.base import Task, has_conversations
from cohort.tasks.calls import check_messages, get_label, make_messages, quote_id, resolve_row
from cohort.tasks.environment import KeyedDraws, Opening, Step
from cohort.tasks.grading import grade
from cohort.tools.formats import FORMATS, FormatName, NamedResult
from cohort.tools.run import CallLimits, run_calls
from cohort.tools.schema import Tool, make_tools
from cohort.types import Answer, Finish, Key, Message, Row
from cohort.user_code import describe_result, report_errors

# Methods of an environment with `reset` that are no tools.
_NO_TOOLS = {"reset", "get_reward", "close"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationRules:
    """The limits of a conversation, and how the model writes calls."""

    max_turns: int  # of the policy
    max_calls: int  # of tools, in the whole conversation
    format: FormatName
    seconds: float  # for the calls of one turn
    characters: int  # of one result


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedEpisode:
    """What an episode begins with."""

    messages: list[Message]
    tools: dict[str, Tool]
    environment: Any  # the user's object; None = the task has none

    def describe(self) -> Opening:
        """Returns the messages and the descriptions of the tools."""
        return Opening(messages=self.messages, tools=[tool.describe() for tool in self.tools.values()])


def open_episode(task: Task, row: Row, draws: KeyedDraws) -> OpenedEpisode:
    """Starts an episode of a task on a row: makes the environment, if there is one, and asks for its first messages.

    Raises TaskError if they are no messages or a tool cannot be described, and UserCodeError if the user's code raises.
    """
    task, row = resolve_row(task, row)
    environment = _make_environment(task)
    where = f'task "{task.name}", row {quote_id(row["id"])}'
    if environment is None:
        messages = make_messages(task, row)
    elif hasattr(environment, "reset"):
        messages = _reset(environment, make_messages(task, row), row, task)
    else:
        with report_errors(f'the method start of the environment of the task "{task.name}"', type(environment)):
            started = environment.start(row, draws)
        messages = check_messages(_read_opening(started), f"{where}: the method `start`", type(environment).start)
    return OpenedEpisode(messages=messages, tools=_collect_tools(task, environment), environment=environment)


def make_opening(task: Task, row: Row) -> Opening:
    """Returns the messages and tools with which an episode of a row begins, at its first visit in a run with seed 0.

    Raises what `open_episode` and `make_messages` raise.
    """
    if not has_conversations(task):
        return Opening(messages=make_messages(task, row))
    key = Key(seed=0, purpose="train", task=get_label(task, row), prompt_id=row["id"], visit=0, sample=-1)
    return open_episode(task, row, KeyedDraws(key)).describe()


def _make_environment(task: Task) -> Any:
    """Returns a new environment of a task; None if the task has none."""
    make = getattr(task, "environment", None)
    if make is None:
        return None
    with report_errors(f'the method environment of the task "{task.name}"', type(task)):
        environment = make()
    has_reset = callable(getattr(environment, "reset", None))
    has_steps = all(callable(getattr(environment, name, None)) for name in ("start", "step"))
    if has_reset and has_steps:
        raise TaskError(
            f'task "{task.name}": its environment has `reset` as well as `start` and `step`; remove `reset`, or remove '
            "the other two"
        )
    if has_reset and not hasattr(environment, "get_reward") and not hasattr(task, "score"):
        raise TaskError(
            f'task "{task.name}" has no reward: give its environment a method get_reward(), or the task a method '
            "score(row, answer)"
        )
    if not has_reset and not has_steps:
        raise TaskError(
            f'task "{task.name}": its method `environment` returned {describe_result(environment, make)}; return a new '
            "object with the methods start(row, draws) and step(answer), or with reset()"
        )
    return environment


def _read_opening(started: Any) -> Any:
    """Returns the messages in what a user's `start` returned: a text of the user, messages, or an Opening."""
    if isinstance(started, str):
        return [{"role": "user", "content": started}]
    return started.messages if isinstance(started, Opening) else started


def _reset(environment: Any, messages: list[Message], row: Row, task: Task) -> list[Message]:
    """Resets an environment and returns the messages of the prompt. A text that `reset` returns is added to the last.

    `reset` is given the columns of the row that it has parameters for.
    """
    accepted = inspect.signature(environment.reset).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    columns = {name: value for name, value in row.items() if takes_all or name in accepted}
    with report_errors(f'the method reset of the environment of the task "{task.name}"', type(environment)):
        more = environment.reset(**columns)
    if not isinstance(more, str) or not more:
        return messages
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last.get('content') or ''}{more}"}]


def _collect_tools(task: Task, environment: Any) -> dict[str, Tool]:
    """Returns the tools of the task and of its environment, by name."""
    functions = [*_list_functions(task), *_list_functions(environment)]
    if hasattr(environment, "reset"):
        names = [name for name in dir(environment) if not name.startswith("_") and name not in _NO_TOOLS]
        functions += [method for name in names if inspect.ismethod(method := getattr(environment, name))]
    return make_tools(functions)


def _list_functions(owner: Any) -> list[Callable[..., Any]]:
    """Returns the functions in `owner.tools`: a tuple or list of functions, methods or names of methods, or a method
    that returns one."""
    tools = getattr(owner, "tools", ())
    if callable(tools) and hasattr(tools, "__self__"):
        with report_errors(f"the method tools of {type(owner).__name__}", type(owner)):
            tools = tools()
    if not isinstance(tools, tuple | list):
        raise TaskError(
            f"the tools of {type(owner).__name__} are {str(tools)[:60]}; write a tuple of functions, as in tools = "
            "(look_up,)"
        )
    functions = []
    for tool in tools:
        name = tool if isinstance(tool, str) else getattr(tool, "__name__", "")
        if isinstance(tool, str) and not callable(getattr(owner, tool, None)):
            raise TaskError(f'{type(owner).__name__} has no method "{tool}", which its tools name; define it')
        # A method named in the body of its class is not bound to an object yet.
        is_method = isinstance(tool, str) or getattr(type(owner), name, None) is tool
        functions.append(getattr(owner, name) if is_method else tool)
    return functions


class ConversationEnvironment:
    """The environment of a task with tools, with an environment of its own, or with both."""

    def __init__(self, task: Task, rules: ConversationRules) -> None:
        self.task = task  # that of the row, once the episode is open
        self.rules = rules
        self.row: Row = {}
        self._given: tuple[Any, Row] = (task, {})  # the task and the row of the prompt, which may be those of a mixture
        self.num_turns = 0
        self.outcomes: list[str] = []  # of all calls so far
        self._opened = OpenedEpisode(messages=[], tools={}, environment=None)

    def start(self, row: Row, draws: KeyedDraws) -> Opening:
        """Opens the episode of a row and returns its first messages and tools."""
        self._given = (self._given[0], row)
        self.task, self.row = resolve_row(*self._given)
        self._opened = open_episode(self.task, self.row, draws)
        return self._opened.describe()

    def step(self, answer: Answer) -> Step:
        """Runs the calls of an answer, or gives it to the user's environment, or scores it if there is none.

        An answer that was cut off, and one at a limit of turns or calls, ends the episode.
        """
        return self._rename_parts(self._step(answer))

    def _step(self, answer: Answer) -> Step:
        """Returns the step for an answer, with the parts as the row's own task names them."""
        self.num_turns += 1
        if self.num_turns == 1:
            self._require_same_opening(answer)
        rules, tools = self.rules, self._opened.tools
        calls = FORMATS[rules.format].find_calls(answer.full, tools) if tools else []
        # An answer that was cut off has not ended its turn, so nothing can follow it.
        if answer.finish != Finish.STOP:
            return self._score(answer)
        if not calls:
            return self._limit_turns(self._answer_message(answer), answer)
        if len(self.outcomes) + len(calls) > rules.max_calls:
            return replace(self._score(answer), ending=str(Finish.CALLS))
        results = run_calls(calls, tools, CallLimits(seconds=rules.seconds, characters=rules.characters))
        self.outcomes += [str(result.outcome) for result in results]
        named = [NamedResult(name=result.name or "tool", content=result.content) for result in results]
        counts = dict(Counter(str(result.outcome) for result in results))
        step = Step(replies=FORMATS[rules.format].make_replies(named), done=False, calls=counts)
        return self._limit_turns(step, answer)

    def close(self, answer: Answer, limit: Finish) -> Step:
        """Scores the conversation as it is, because there is no room for a further turn."""
        return self._rename_parts(replace(self._score(answer), ending=str(limit)))

    def _rename_parts(self, step: Step) -> Step:
        """Returns the step with the names that the task of the prompt has for the parts: a mixture may have others."""
        task, row = self._given
        if task is self.task or step.parts is None:
            return step
        return replace(step, parts=task.rename_parts(row, step.parts))

    def _limit_turns(self, step: Step, answer: Answer) -> Step:
        """Returns the step, or the last one of the episode if the policy has no turn left."""
        if step.done or self.num_turns < self.rules.max_turns:
            return step
        if step.parts is not None:
            # The environment has said what the episode has earned so far.
            return replace(step, done=True, replies=[], ending=str(Finish.TURNS))
        last = self._score(answer)
        earned = step.earned + last.earned
        return replace(last, ending=str(Finish.TURNS), calls=step.calls, earned=earned, cost=step.cost + last.cost)

    def _answer_message(self, answer: Answer) -> Step:
        """Returns the step for an answer without calls: that of the user's environment, or the score of the task."""
        environment = self._opened.environment
        if not hasattr(environment, "step"):
            return self._score(answer)
        step = environment.step(replace(answer, calls=list(self.outcomes)))
        if isinstance(step, str):
            return Step(replies=[{"role": "user", "content": step}], done=False)
        if not isinstance(step, Step):
            raise TaskError(
                f'task "{self.task.name}", row {quote_id(self.row["id"])}: the method `step` returned '
                f"{describe_result(step, type(environment).step)}; return cohort.Step(...), or a text as the reply"
            )
        where = f'task "{self.task.name}", row {quote_id(self.row["id"])}: the method `step` returned a Step'
        if step.done and step.replies:
            raise TaskError(f"{where} that is done and has `replies`; write done=False if the episode goes on")
        if step.done and step.parts is None:
            if not hasattr(self.task, "score"):
                raise TaskError(
                    f"{where} that is done and has no `parts`, and the task has no method `score`; give the reward, as "
                    'in Step(parts={"correct": 1.0})'
                )
            return replace(self._score(answer), earned=step.earned, cost=step.cost)
        if not step.done and not step.replies:
            raise TaskError(f"{where} that is not done and has no `replies`; give a reply, or set done=True")
        return step

    def _score(self, answer: Answer) -> Step:
        """Returns the last step of the episode: the task's score, the environment's reward, or 0 if neither gives one.

        An environment that was not done when the episode ended has given no reward.
        """
        environment = self._opened.environment
        if hasattr(environment, "get_reward") and not hasattr(self.task, "score"):
            with report_errors(f'the method get_reward of the task "{self.task.name}"', type(environment)):
                found = environment.get_reward()
            return Step(parts=_read_reward(self.task, found))
        if hasattr(self.task, "score"):
            outcome = grade(self.task, self.row, replace(answer, calls=list(self.outcomes)))
            return Step(parts=outcome.parts, reason=outcome.reason)
        return Step(parts=dict.fromkeys(self.task.parts, 0.0), reason="the conversation ended before a reward")

    def _require_same_opening(self, answer: Answer) -> None:
        """Raises TaskError if the episode began otherwise than the prompt that the policy was shown."""
        expected = self._opened.messages
        # A last message of the assistant is continued by the answer.
        if expected[-1]["role"] == "assistant":
            expected = expected[:-1]
        if answer.conversation[: len(expected)] != expected:
            raise TaskError(
                f'task "{self.task.name}", row {quote_id(self.row["id"])}: the environment begins differently each '
                "time; draw with draws.for_group(NAME), and use nothing else that changes"
            )


def _read_reward(task: Task, found: Any) -> dict[str, float]:
    """Returns what `get_reward` returned as the parts of the task: a dict of them, or a number.

    A number becomes the part "reward", if the task declares it; the accuracy, if there is one, is then whether it is at
    least 1. A task that declares only one part gets the number itself.
    """
    if isinstance(found, Mapping):
        return dict(found)
    if not isinstance(found, Real) or not math.isfinite(found):
        raise TaskError(f'task "{task.name}": get_reward returned {str(found)[:40]!r}; return a number or a dict')
    value = float(found)
    if "reward" not in task.parts:
        return {task.accuracy or task.parts[0]: value}
    return {"reward": value} | ({task.accuracy: float(value >= 1.0)} if task.accuracy is not None else {})
