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
from cohort.data.pack import make_batch
from cohort.engines.sync import WeightSync
from cohort.learner.base import Learner
from cohort.loops.learning import annotate, record
from cohort.loops.reuse import Replay
from cohort.loops.stats import StepStats, step_stats
from cohort.rollout.producer import Producer
from cohort.run.job import Steps, rollout_record
from cohort.types import Group


def train(
    run: Steps, config: RL, producer: Producer, learner: Learner, sync: WeightSync, algo: Algorithm, replay: Replay
) -> None:
    """Run every remaining step of `run`."""
    for step in run.steps():
        groups = producer.collect(config.batch.prompts, accept=algo.accept)
        groups += replay.draw(step)  # of earlier steps, where asked for
        groups, stats = improve(learner, algo, groups, config.learner)
        producer.settle(groups)  # these prompts are done with: a checkpoint need not bring them back
        sync.send(version=step + 1)  # no copy when storage is shared
        run.end_step(step, rollout_record(step, groups, stats.metrics))  # log, evaluate, checkpoint


def improve(
    learner: Learner, algo: Algorithm, groups: list[Group], config: LearnerConfig
) -> tuple[list[Group], StepStats]:
    """What a step makes of its scored groups; `cohort replay` makes it of stored ones."""
    world = learner.world  # baselines and metrics are over the groups of all ranks
    annotate(learner, groups, algo.needs())  # what other policies say of the tokens, only when asked for
    groups = algo.advantages(groups, world)  # drops nothing silently: every exclusion carries its reason
    update = learner.update(make_batch(groups, config.minibatches), algo)  # epochs x minibatches x microbatches
    record(groups, update)
    metrics = update.metrics | algo.observe(update.metrics)  # steers its coefficients, if it has targets
    return groups, step_stats(groups, metrics, world)
