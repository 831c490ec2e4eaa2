"""Starts the scoring pool of a task: how many workers it has, and within which limits they work."""

from __future__ import annotations

from cohort.scoring.pool import ScoringPool
from cohort.scoring.wire import Limits
from cohort.system.kernel import count_cores
from cohort.tasks.base import Task
from cohort.tasks.conversation import ConversationRules
from cohort.tasks.environment import AgainRules

MAX_WORKERS = 8  # that `choose_num_workers` returns


def choose_num_workers(task: Task) -> int:
    """Returns how many scoring workers to start for a task: 1 without `work_seconds`, since its grader is quick.

    A task with `work_seconds` (a slow grader) gets one per processor that this process may use, less the one that
    samples and trains, but at least 1 and at most 8.
    """
    if not task.work_seconds:
        return 1
    return max(1, min(MAX_WORKERS, count_cores() - 1))


def start_scorer(
    task: Task,
    again: AgainRules | None = None,
    rules: ConversationRules | None = None,
    num_workers: int = 0,
) -> ScoringPool:
    """Starts the workers that score the answers to a task, and run its tools and environments.

    `again` and `rules` are those of second attempts and conversations. `num_workers` 0 = as many as the task needs.
    """
    # The calls of a turn have their time, and then the grader has its own.
    limits = Limits() if rules is None else Limits(seconds=Limits().seconds + rules.seconds)
    return ScoringPool(task, num_workers or choose_num_workers(task), limits, again=again, conversation=rules)
