"""Starts the scoring pool of a task: which kind it is, how many workers it has, and within which limits they work."""

from __future__ import annotations

from cohort.config.scoring import ScoringConfig
from cohort.errors import ConfigError
from cohort.sandbox import find_missing
from cohort.scoring.base import Pool
from cohort.scoring.journal import JournaledPool
from cohort.scoring.pool import ScoringPool
from cohort.scoring.process import is_reserved
from cohort.scoring.service import ServicePool
from cohort.scoring.wire import Limits
from cohort.system.kernel import count_cores
from cohort.tasks.base import Task, list_own_tasks
from cohort.tasks.conversation import ConversationRules
from cohort.tasks.environment import AgainRules
from cohort.tasks.grading import scores_groups
from cohort.tasks.parts import PartRules
from cohort.tasks.ref import TaskRef, compute_grader_digest

MAX_WORKERS = 8  # that `choose_num_workers` returns
SECONDS = 10.0  # for scoring one answer, if no setting says otherwise
SERVICE_SECONDS = 120.0  # the same where scoring asks an outside service


def choose_num_workers(task: Task) -> int:
    """Returns how many scoring workers to start for a task: 1 without `work_seconds`, since its grader is quick.

    A task with `work_seconds` (a slow grader) gets one per processor that this process may use, less the one that
    samples and trains, but at least 1 and at most 8.
    """
    if not task.work_seconds:
        return 1
    return max(1, min(MAX_WORKERS, count_cores() - 1))


def check_variables(task: Task, config: ScoringConfig) -> None:
    """Raises ConfigError if variables are to be given to a task that runs programs of the model: none run beside keys.

    In a mixture the workers score all tasks, so that one such task is enough. Raises it also for a variable that
    workers have anyway, with a value of their own or the user's: that is no key, and would be removed from messages.
    """
    for name in filter(is_reserved, config.env):
        raise ConfigError(
            f"--scoring.env {name} cannot be given: the workers that score have their own {name}. Leave it out."
        )
    names = ", ".join(own.name for own in list_own_tasks(task) if own.needs_sandbox)
    if task.needs_sandbox and config.env:
        raise ConfigError(
            f"--scoring.env {' '.join(config.env)} cannot be given to workers of the task {names}, which "
            "runs programs of the model: these never run beside keys. Leave it out, or use that task in a run of its "
            "own."
        )


def start_scorer(
    task: Task,
    config: ScoringConfig | None = None,
    again: AgainRules | None = None,
    rules: ConversationRules | None = None,
) -> Pool:
    """Starts the workers that score the answers to a task, and run its tools and environments.

    `config` are the settings; None = the default ones. `again` and `rules` are those of second attempts and
    conversations. Raises ConfigError if a variable of `config.env` is not set or cannot be given to the task, and if a
    task that scores groups has episodes of several turns.
    """
    config = config or ScoringConfig()
    config.require_variables()
    check_variables(task, config)
    has_turns = again is not None or rules is not None
    if scores_groups(task) and has_turns:
        raise ConfigError(
            f"the task {task.name} scores the answers of a group together (score_group or rewards), which is possible "
            "only for samples of one turn. Remove --turns, or give the task a method score."
        )
    seconds = config.seconds or (SERVICE_SECONDS if task.service else SECONDS)
    if task.needs_sandbox and config.sandbox == "auto" and (missing := find_missing()):
        raise ConfigError(
            f"the task {task.name} runs programs that the model writes, and there is no sandbox for them: {missing}. "
            "Use another machine, or run them without one, as you: --scoring.sandbox none."
        )
    env = config.env
    if task.service and not has_turns:
        pool: Pool = ServicePool(
            task, config.workers or 1, config.concurrency, Limits(seconds=seconds), config.retries, env, config.sandbox
        )
    else:
        # The calls of a turn have their time, and then the grader has its own.
        limits = Limits(seconds=seconds + (0.0 if rules is None else rules.seconds))
        workers = config.workers or choose_num_workers(task)
        pool = ScoringPool(task, workers, limits, again, rules, env, config.sandbox)
    if not task.service:
        return pool
    settings = TaskRef.from_task(task).settings
    parts = PartRules(parts=task.parts, accuracy=task.accuracy, optional=task.optional_parts)
    return JournaledPool(pool, f"{compute_grader_digest(task)} {sorted(settings.items())}", parts)
