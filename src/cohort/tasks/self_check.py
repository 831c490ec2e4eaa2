"""The self-check of a task: an empty answer earns nothing, and a right one earns full marks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from cohort.errors import TaskError
from cohort.tasks.base import Task, make_plain_answer, normalise_row
from cohort.tasks.calls import get_gold, iterate_rows, resolve_row
from cohort.tasks.grading import grade


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The result of a self-check: how many rows passed, and for how many of them a gold answer was scored."""

    num_rows: int
    num_gold: int


def run_self_check(task: Task, num_rows: int = 20) -> SelfCheck:
    """Scores an empty answer and, where the task has `gold`, a right one on the first `num_rows` rows of each split.

    The splits are train and test. Returns how many rows passed, both splits together, and for how many of them a gold
    answer was scored. Raises TaskError if any part of an empty answer is above 0, if a gold answer is not right, if a
    row or its parts are not valid, or if there are no rows in either split. Without an accuracy, a reward may be above
    0 for an empty answer and has no right value for a gold one: it is only checked that both can be scored.
    """
    checked = num_gold = 0
    for split in ("train", "test"):
        for index, raw in enumerate(islice(iterate_rows(task, split), num_rows)):
            row = normalise_row(task.name, index, raw)
            where = f'task "{task.name}", row "{row["id"]}" of "{split}"'
            # Only the environment knows what an episode earns.
            if hasattr(resolve_row(task, row)[0], "environment"):
                checked += 1
                continue
            empty = grade(task, row, make_plain_answer(""))
            if task.accuracy is not None and max(empty.parts.values()) > 0:
                raise TaskError(
                    f"{where}: an empty answer scores {empty.parts}; correct method `score`: no part may be above 0"
                )
            text = get_gold(task, row)
            if text is not None:
                num_gold += 1
                best = grade(task, row, make_plain_answer(text))
                if task.accuracy is not None and best.parts[task.accuracy] != 1:
                    raise TaskError(
                        f"{where}: the gold answer {text!r} scores {best.parts} (reason: {best.reason or 'none'}); "
                        f"its {task.accuracy} must be 1: correct the task's method `gold` or `score`"
                    )
            checked += 1
    if not checked:
        raise TaskError(
            f'no row of task "{task.name}" was checked; its method `rows` must yield some for "train" or "test", '
            "and num_rows must be at least 1"
        )
    return SelfCheck(checked, num_gold)
