"""The reinforcement-learning loop: the algorithm on one screen.

    cohort train RECIPE             one process
    cohort resume RUN               the same loop, from the last checkpoint

It is synchronous: every group is sampled from the weights it then trains, so the importance ratio is exactly 1
until a batch is reused (learner.epochs, learner.minibatches > 1). Only `replay` brings in groups of older weights.
"""

from __future__ import annotations

from cohort.algos.algorithm import Algorithm
from cohort.config.kinds import RL
from cohort.config.schema import LearnerConfig
from cohort.data.pack import pack
from cohort.engines.base import Engine
from cohort.engines.rollout import Tasks, collect
from cohort.learner.base import Learner
from cohort.loops.job import Steps, rollout_record
from cohort.loops.replay import Replay
from cohort.loops.stats import StepStats, step_stats
from cohort.types import Group


def train(
    run: Steps, config: RL, engine: Engine, learner: Learner, tasks: Tasks, algo: Algorithm, replay: Replay
) -> None:
    """Run every remaining step of `run`."""
    batch_size = config.batch
    for step in run.steps():
        groups = collect(engine, tasks, batch_size.prompts, batch_size.samples, accept=algo.accept)
        groups += replay.draw(step)  # of earlier steps, where asked for
        groups, stats = improve(learner, algo, groups, config.learner)
        engine.load(learner.weights(), version=step + 1)  # no copy when storage is shared
        run.end_step(step, rollout_record(step, groups, stats.metrics))  # log, evaluate, checkpoint


def improve(
    learner: Learner, algo: Algorithm, groups: list[Group], config: LearnerConfig
) -> tuple[list[Group], StepStats]:
    """What a step makes of its scored groups; `cohort replay` makes it of stored ones."""
    learner.annotate(groups, algo.needs())  # what other policies say of the tokens, only when asked for
    groups = algo.advantages(groups)  # drops nothing silently: every exclusion carries its reason
    batch = pack(groups, learner.token_budget, config.minibatches, share=config.prefix_sharing)
    update = learner.update(batch, algo)  # epochs x minibatches x microbatches
    update |= algo.observe(update)  # steers its weights, if it has targets
    return groups, step_stats(groups, batch, update)
