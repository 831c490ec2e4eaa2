"""The reinforcement-learning loop: the algorithm on one screen.

    cohort train RECIPE             one process
    cohort resume RUN               the same loop, from the last checkpoint

It is synchronous: every group is sampled from the weights it then trains, so the importance ratio is exactly 1
until a batch is reused (learner.epochs, learner.minibatches > 1). Only `replay` brings in groups of older weights.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from cohort import clock
from cohort.algos.algorithm import Algorithm
from cohort.config.schema import LearnerConfig
from cohort.data.pack import make_batch
from cohort.engines.base import Engine
from cohort.engines.rollout import Tasks, collect
from cohort.learner.base import Found, Learner, Update
from cohort.train.replay import Replay
from cohort.train.run import Run
from cohort.train.stats import StepStats, step_stats
from cohort.types import Group
from cohort.world import ONE_PROCESS, World

log = logging.getLogger("cohort.learner")  # notices are the learner's


def train(run: Run, engine: Engine, learner: Learner, tasks: Tasks, algo: Algorithm, replay: Replay) -> None:
    """Run every remaining step of `run`."""
    batch_size, config = run.config.batch, run.config.learner
    for step in run.steps():
        groups = collect(engine, tasks, batch_size.prompts, batch_size.samples, accept=algo.accept)
        groups += replay.draw(step)  # of earlier steps, where asked for
        groups, stats = improve(learner, algo, groups, config)
        engine.load(learner.weights(), version=step + 1)  # no copy when storage is shared
        run.end_step(step, groups, stats)  # log, evaluate, checkpoint


def improve(
    learner: Learner, algo: Algorithm, groups: list[Group], config: LearnerConfig, world: World = ONE_PROCESS
) -> tuple[list[Group], StepStats]:
    """What a step makes of its scored groups; `cohort replay` makes it of stored ones."""
    annotate(learner, groups, algo.needs())  # what other policies say of the tokens, only when asked for
    groups = algo.advantages(groups, world)  # drops nothing silently: every exclusion carries its reason
    update = learner.update(make_batch(groups, config.minibatches), algo)  # epochs x minibatches x microbatches
    record(groups, update)
    metrics = update.metrics | algo.observe(update.metrics)  # steers its coefficients, if it has targets
    return groups, step_stats(groups, metrics, world)


def annotate(learner: Learner, groups: list[Group], needs: Collection[str]) -> None:
    """Ask the learner for log-probabilities and store them in the samples."""
    found = learner.annotate(groups, needs)
    store_logprobs(groups, "old_logprobs", found.old)
    store_logprobs(groups, "ref_logprobs", found.ref)
    clock.add(found.seconds)


def record(groups: list[Group], update: Update) -> None:
    """Store what an update found, and pass on what it has to tell."""
    store_logprobs(groups, "old_logprobs", update.old)
    clock.add(update.seconds)
    for level, text in update.notices:
        log.log(logging.getLevelNamesMapping()[level.upper()], "%s", text)


def store_logprobs(groups: list[Group], field: str, found: Found | None) -> None:
    """Write log-probabilities into the samples they are of."""
    known = {} if found is None else found.by_id()
    for group in groups if known else ():
        for id, sample in zip(group.ids(), group.samples, strict=True):
            if id in known:
                setattr(sample, field, known[id])
