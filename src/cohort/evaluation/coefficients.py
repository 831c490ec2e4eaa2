"""The coefficients with which the parts of a reward are added up in evaluations of tasks without an accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cohort.errors import ConfigError, suggest_name
from cohort.tasks.base import Task


def list_coefficients(task: Task, given: Mapping[str, float]) -> dict[str, float]:
    """Returns the coefficient of every part of a task, 1 where `given` has none; {} if the task has an accuracy.

    The accuracy is one of the parts, so that no coefficient changes it.
    """
    return {} if task.accuracy is not None else {part: float(given.get(part, 1.0)) for part in task.parts}


def read_coefficients(task: Task, words: Sequence[str]) -> dict[str, float]:
    """Returns the coefficients that the words after --reward name, such as "brief=0.5", by part.

    Raises ConfigError for other words, for a part that the task does not have, and if the task has an accuracy.
    """
    if words and task.accuracy is not None:
        raise ConfigError(
            f"the task {task.name} has an accuracy, on which --reward has no effect: remove --reward {' '.join(words)}."
        )
    found: dict[str, float] = {}
    for word in words:
        part, _, number = word.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"--reward {word} is no coefficient. Write PART=NUMBER, as in {task.parts[0]}=0.5.")
        if part not in task.parts:
            raise ConfigError(f'unknown reward part "{part}" of task {task.name}.{suggest_name(part, task.parts)}')
        found[part] = value
    return found


def format_coefficients(coefficients: Mapping[str, float]) -> str:
    """Returns coefficients as the words after --reward; "none" if there are none.

    >>> format_coefficients({"score": 1.0, "brief": 0.5})
    'score=1 brief=0.5'
    """
    return " ".join(f"{part}={value:g}" for part, value in coefficients.items()) or "none"
