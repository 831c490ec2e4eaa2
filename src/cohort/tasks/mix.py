"""A mixture: several tasks in one run, each with a share of the prompts.

A row of the mixture is {"id": "LABEL/ID", "task": LABEL, "row": row of the task}. The label is the task's name, or
"NAME-2" and so on where a mixture has the same task several times. Prompts, tools, environments and scores are those of
the row's own task, which is given its own row (`for_row`). A stream gives each task its share of the prompts, and every
task has epochs of its own (module `order`).

Reward parts are those of all tasks, and an answer has the parts of its own task. If every task has an accuracy, the
part is called "correct" in the mixture, whatever its name is in the task.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from cohort.errors import CohortError, TaskError, UserCodeError
from cohort.system.json_text import parse_json
from cohort.tasks.base import TASKS, Task, Verdict, choose_class, normalise_row, require, task
from cohort.tasks.calls import call_prompt, compute_summary, get_gold, iterate_rows
from cohort.tasks.grading import grade, grade_async, grade_group, grade_group_async, has_async_grader, scores_groups
from cohort.tasks.order import MAX_PATTERN, make_weights
from cohort.tasks.parts import ACCURACY
from cohort.tasks.ref import TaskRef
from cohort.types import Answer, Message, Outcome, Row
from cohort.user_code import make_spec_absolute, split_spec

log = logging.getLogger(__name__)

NAME = "mix"
# A task's name, perhaps with the path of a file before it. Only a path may have braces, and settings have quotes.
_SPEC = re.compile(r"[^{}]+|.*\.py:[^{}\":/]+", re.DOTALL)
# What JSON may have for a setting, by the type of its default. Others are checked by the task itself.
_JSON_TYPES: dict[type, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (str,),
    tuple: (list,),
}


@task(NAME)
class Mix:
    """Several tasks in one run, each with a share of the prompts."""

    tasks: tuple[str, ...] = ("arithmetic", "countdown")
    """The tasks: names, or file.py:NAME, each perhaps with settings as JSON, as in 'countdown{"max_numbers": 3}'."""
    shares: tuple[float, ...] = ()
    """The share of each task in the prompts, as numbers in proportion; 0 = evaluated, not trained on. Without any,
    they are equal."""

    def __post_init__(self) -> None:
        # No task is loaded here: a file of a user runs only when it is needed.
        entries = tuple(entry if isinstance(entry, str) else write_entry(entry) for entry in self.tasks)
        require(NAME, len(entries) >= 1, "one task or more in tasks")
        object.__setattr__(self, "tasks", tuple(_make_absolute(entry) for entry in entries))
        object.__setattr__(self, "shares", tuple(float(share) for share in self.shares))
        allowed = all(0 <= share < math.inf for share in self.shares)
        require(NAME, allowed, f"shares that are finite and at least 0, not {_list_numbers(self.shares)}")
        num, num_shares = len(self.tasks), len(self.shares)
        require(NAME, num_shares in (0, num), f"one share per task: there are {num} tasks and {num_shares} shares")
        require(NAME, not self.shares or any(self.shares), "a share above 0: with all shares 0 nothing is trained on")
        total = sum(make_weights(self.shares)) if self.shares else num
        rounder = (
            f"shares whose sum in whole numbers is at most {MAX_PATTERN:,}, such as 2 1 or 0.25 0.75; "
            f"{_list_numbers(self.shares)} has {total:,}, so round them"
        )
        require(NAME, total <= MAX_PATTERN, rounder)

    @staticmethod
    def list_specs(settings: Mapping[str, Any]) -> list[str]:
        """Returns the tasks that recorded settings of a mixture name, without their settings. Loads none."""
        entries = settings.get("tasks", ())
        return [_split_entry(str(entry))[0] for entry in entries] if isinstance(entries, list | tuple) else []

    # -- the tasks

    @cached_property
    def own_tasks(self) -> dict[str, Any]:
        """The tasks by label, in their order. Loaded at the first use, which runs files of users."""
        labels = _make_labels([_split_entry(entry)[0] for entry in self.tasks])
        return {label: load_entry(entry) for label, entry in zip(labels, self.tasks, strict=True)}

    @cached_property
    def weights(self) -> dict[str, int]:
        """How many prompts of a cycle each task has, by label."""
        return dict(zip(self.own_tasks, make_weights(self.shares or (1.0,) * len(self.tasks)), strict=True))

    def get_label(self, row: Row) -> str:
        """Returns the label of a row's task."""
        return str(row["task"])

    def for_row(self, row: Row) -> tuple[Task, Row]:
        """Returns the task of a row, and the row as that task knows it."""
        return self.own_tasks[row["task"]], row["row"]

    def rename_parts(self, row: Row, parts: Mapping[str, float]) -> dict[str, float]:
        """Returns the parts that a row's task gave, as the mixture names them."""
        old = self.own_tasks[row["task"]].accuracy
        return {self.accuracy if self.accuracy and name == old else name: value for name, value in parts.items()}

    # -- what `@cohort.task` sets on other tasks

    @cached_property
    def accuracy(self) -> str | None:
        """The part "correct" if every task has an accuracy; None = the mean reward is measured."""
        return ACCURACY if all(own.accuracy is not None for own in self.own_tasks.values()) else None

    @cached_property
    def _own_parts(self) -> dict[str, tuple[str, ...]]:
        """The parts of each task, as the mixture names them. Raises TaskError if a task has two for one name."""
        for label, own in self.own_tasks.items():
            if self.accuracy and own.accuracy != ACCURACY and ACCURACY in own.parts:
                raise TaskError(
                    f'mix: the accuracy of {label} is "{own.accuracy}", which the mixture calls "{ACCURACY}", and it '
                    "has another part of that name; rename that part in the task"
                )
        own_parts = {label: dict.fromkeys(own.parts, 0.0) for label, own in self.own_tasks.items()}
        return {label: tuple(self.rename_parts({"task": label}, parts)) for label, parts in own_parts.items()}

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The parts of all tasks. Parts of the same name share their coefficient."""
        return tuple(dict.fromkeys(part for parts in self._own_parts.values() for part in parts))

    @cached_property
    def optional_parts(self) -> bool:
        """Whether an answer may lack a part: the tasks have different ones, or a task allows it."""
        differ = any({*parts} != {*self.parts} for parts in self._own_parts.values())
        return differ or any(own.optional_parts for own in self.own_tasks.values())

    @property
    def service(self) -> bool:
        """Whether the grader of a task asks an outside service."""
        return any(own.service for own in self.own_tasks.values())

    @property
    def needs_sandbox(self) -> bool:
        """Whether the grader of a task runs programs of the model. Then no task of the mixture sees keys."""
        return any(own.needs_sandbox for own in self.own_tasks.values())

    @property
    def work_seconds(self) -> float:
        """The most CPU seconds of a task's grader; 0 beside a task that asks an outside service, which may wait."""
        return 0.0 if self.service else max(own.work_seconds for own in self.own_tasks.values())

    @property
    def max_tokens(self) -> int:
        """The largest limit of a task's completions."""
        return max(own.max_tokens for own in self.own_tasks.values())

    @property
    def packages(self) -> dict[str, str]:
        """The packages of all tasks."""
        return {module: source for own in self.own_tasks.values() for module, source in own.packages.items()}

    # -- rows, prompts and scores

    def rows(self, split: str) -> Iterator[Row]:
        """Yields the rows of all tasks in turn, one of each, until the last has no more.

        So the first rows have equally many of each task. A task with the share 0 has no training rows.
        """
        is_used = {label: split != "train" or weight > 0 for label, weight in self.weights.items()}
        waiting = {label: self._read_rows(label, split) for label, used in is_used.items() if used}
        is_first = True
        while waiting:
            for label in list(waiting):
                row = next(waiting[label], None)
                if row is None:
                    del waiting[label]
                else:
                    yield row
            if is_first and split == "test":
                self._note_without_tests([label for label in self.own_tasks if label not in waiting], bool(waiting))
            is_first = False

    def _note_without_tests(self, labels: Sequence[str], others: bool) -> None:
        """Says once which tasks have no test rows; `others` = some have. If none has, others say that already."""
        for label in labels:
            if label in self._noted or not (others or self.weights[label] == 0):
                continue
            self._noted.add(label)
            what = "it is not evaluated" if self.weights[label] else "with the share 0 it is never used"
            log.warning("mix: the task %s has no test rows: %s", label, what)

    @cached_property
    def _noted(self) -> set[str]:
        """The tasks of which it was said that they have no test rows."""
        return set()

    def _read_rows(self, label: str, split: str) -> Iterator[Row]:
        """Yields the rows of a task as rows of the mixture. Raises TaskError if there are none to train on."""
        own = self.own_tasks[label]
        is_empty = True
        for index, raw in enumerate(iterate_rows(own, split)):
            row = normalise_row(own.name, index, raw)
            is_empty = False
            yield {"id": f"{label}/{row['id']}", "task": label, "row": row}
        if is_empty and split == "train":
            raise TaskError(
                f'mix: the task {label} has no rows for the split "train"; give it some, or the share 0 in '
                "--task.shares if it is only to be evaluated"
            )

    def prompt(self, row: Row) -> list[Message]:
        """Returns the prompt of the row's task."""
        prompt: list[Message] = call_prompt(_untyped(self), row)
        return prompt

    def gold(self, row: Row) -> str | None:
        """Returns a right answer; None if the row's task has no method `gold`."""
        return get_gold(self, row)

    @cached_property
    def _waits(self) -> bool:
        """Whether the grader of a task is a coroutine."""
        graded = [own for own in self.own_tasks.values() if hasattr(own, "score") or scores_groups(own)]
        return any(map(has_async_grader, graded))

    @property
    def score(self) -> Any:
        """The function score(row, answer) of the row's task; a coroutine if a task's grader is one."""
        return self._score_async if self._waits else self._score

    @property
    def score_group(self) -> Any:
        """The function score_group(row, answers); None if no task scores the answers of a group together."""
        if not any(scores_groups(own) for own in self.own_tasks.values()):
            return None
        return self._score_group_async if self._waits else self._score_group

    def _score(self, row: Row, answer: Answer) -> Verdict:
        """Scores an answer with the grader of the row's task."""
        return _make_verdict(grade(_untyped(self), row, answer))

    async def _score_async(self, row: Row, answer: Answer) -> Verdict:
        """Does what `_score` does, and waits for coroutines."""
        return _make_verdict(await grade_async(_untyped(self), row, answer))

    def _score_group(self, row: Row, answers: Sequence[Answer]) -> list[Verdict]:
        """Scores the answers of a group, together if the row's task does."""
        return [_make_verdict(outcome) for outcome in grade_group(self, row, answers)]

    async def _score_group_async(self, row: Row, answers: Sequence[Answer]) -> list[Verdict]:
        """Does what `_score_group` does, and waits for coroutines."""
        return [_make_verdict(outcome) for outcome in await grade_group_async(self, row, answers)]

    def summary(self, rows: Sequence[Row], parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Returns the numbers of each task's own answers, by names that end in its label.

        They are the accuracy, where the task has one, its own summary or the means of its other parts, and the number
        of problems.
        """
        found: dict[str, float] = {}
        for label, own in self.own_tasks.items():
            mine = [(row["row"], given) for row, given in zip(rows, parts, strict=True) if row["task"] == label]
            if not mine:
                continue
            # The accuracy has the mixture's name for it.
            accuracy = self.accuracy or own.accuracy
            given = [{own.accuracy if name == accuracy else name: v for name, v in p.items()} for _, p in mine]
            values: dict[str, list[float]] = {}
            for one in given:
                for name, value in one.items():
                    values.setdefault(name, []).append(value)
            means = {name: math.fsum(numbers) / len(numbers) for name, numbers in values.items()}
            if own.accuracy is not None and own.accuracy in means:
                found[f"accuracy/{label}"] = means.pop(own.accuracy)
            further = compute_summary(own, [row for row, _ in mine], given) or means
            found |= {f"{name}/{label}": value for name, value in further.items()}
            found[f"problems/{label}"] = len({row["id"] for row, _ in mine})
        return found


def list_specs(mixture: Any) -> list[str]:
    """Returns the tasks that a mixture names, without their settings; also one that was made of a recorded config."""
    return Mix.list_specs({"tasks": mixture.tasks})


def write_entry(own: Any) -> str:
    """Returns a task as the text that `load_entry` reads: its name, and the settings that are not the default ones."""
    ref = TaskRef.from_task(own)
    plain = {f.name: f.default for f in dataclasses.fields(own)}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
    settings = {name: value for name, value in ref.settings.items() if value != plain[name]}
    spec = f"{ref.path}:{ref.name}" if ref.path else ref.name
    return spec + (json.dumps(settings) if settings else "")


def load_entry(entry: str) -> Any:
    """Returns the task that an entry of `tasks` names, with its settings. The file of a user is run.

    Raises TaskError, with the entry, if it cannot be made, and UserCodeError if the file raises.
    """
    spec, settings = _split_entry(entry)
    where = split_spec(spec)
    ref = TaskRef(name=where[1] if where else spec, settings=settings, path=str(where[0]) if where else "")
    try:
        _check_types(choose_class(TASKS.find(spec), settings), settings)
        own: Any = ref.load()
    except UserCodeError:
        # It shows the line of the user's file.
        raise
    except (CohortError, TypeError, ValueError) as error:
        raise TaskError(f"mix: the entry {entry} of --task.tasks: {error}") from error
    if isinstance(own, Mix):
        raise TaskError(f"mix: the entry {entry} of --task.tasks is a mixture itself; write its tasks instead")
    return own


def _check_types(cls: type, settings: Mapping[str, Any]) -> None:
    """Raises TaskError for a setting whose value is of another type than its default. Unknown ones are not checked."""
    for field in dataclasses.fields(cls):
        kinds = _JSON_TYPES.get(type(field.default))
        value = settings.get(field.name)
        if kinds is None or field.name not in settings or (value is None and "None" in str(field.type)):
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and type(field.default) is not bool):
            example = json.dumps({field.name: field.default})
            raise TaskError(f"its setting {field.name} cannot be {json.dumps(value)}; write it as in {example}")


def _split_entry(entry: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of an entry, and its settings. Raises TaskError if these are no JSON object.

    The settings are the JSON object at the end. Values in it may name files themselves, and so may look like a name.
    """
    remedy = "write a name, or a name and settings as JSON: 'countdown{\"max_numbers\": 3}'"
    text = entry.strip()
    if _SPEC.fullmatch(text):
        return text, {}
    failure: ValueError | None = None
    for place in (match.start() for match in re.finditer(r"\{", text)):
        spec = text[:place].strip()
        if not text.endswith("}") or not _SPEC.fullmatch(spec):
            continue
        try:
            settings: dict[str, Any] = parse_json(text[place:])
            return spec, settings
        except ValueError as error:
            # The brace may be one of a path.
            failure = error
    if failure is None:
        raise TaskError(f"mix: the entry {entry!r} of --task.tasks is no task; {remedy}")
    raise TaskError(f"mix: the settings in the entry {entry} of --task.tasks are no JSON ({failure}); {remedy}")


def _make_absolute(entry: str) -> str:
    """Returns an entry with the absolute path of its file, if it has one: a run may be resumed from another folder."""
    spec, settings = _split_entry(entry)
    return make_spec_absolute(spec) + (json.dumps(settings) if settings else "")


def _make_labels(specs: Sequence[str]) -> list[str]:
    """Returns a label per task: its name, with a number from 2 where the name was used before.

    Raises TaskError if that is the name of another one.

    >>> _make_labels(["gsm8k", "mine.py:own", "gsm8k"])
    ['gsm8k', 'own', 'gsm8k-2']
    """
    used: Counter[str] = Counter()
    labels = []
    for spec in specs:
        name = spec.rpartition(":")[2]
        used[name] += 1
        label = name if used[name] == 1 else f"{name}-{used[name]}"
        if label in labels:
            raise TaskError(f"mix: two tasks would both be called {label} in metrics; name one of them otherwise")
        labels.append(label)
    return labels


def _untyped(mixture: Mix) -> Any:
    """Returns the mixture itself, for functions that take a `Task`, whose attributes are not properties."""
    return mixture


def _make_verdict(outcome: Outcome) -> Verdict:
    """Returns an outcome as a grader returns it."""
    return Verdict(outcome.parts, outcome.reason)


def _list_numbers(shares: Sequence[float]) -> str:
    """Returns shares as text.

    >>> _list_numbers((2.0, 0.5))
    '2 0.5'
    """
    return " ".join(f"{share:g}" for share in shares)
