"""The reinforcement-learning loop: the whole algorithm on one screen.

    cohort train RECIPE             starts it, in one process
    cohort resume RUN               continues it from the newest checkpoint

What it is: a synchronous loop. Each step samples groups with the newest weights, scores them, updates the weights once
on these groups, and hands the new weights to the sampler. So the importance ratio of a fresh sample is exactly 1 until
its batch is used more than once (learner.epochs or learner.minibatches > 1). Only `replay` adds groups that older
weights sampled.

What it is not: it does not overlap sampling with training, and it knows no timers, files or concrete engines.
`run` logs, evaluates and saves, `producer` samples and scores, `learner` computes gradients, and `cohort.jobs.build`
chooses all of them.
"""

from __future__ import annotations

from cohort.algos.algorithm import Algorithm
from cohort.config.kinds import RL
from cohort.config.schema import LearnerConfig
from cohort.data.pack import make_batch
from cohort.engines.sync import WeightSync
from cohort.learner.base import Learner
from cohort.loops.learning import annotate, store_update
from cohort.loops.reuse import RolloutReuse
from cohort.loops.stats import StepStats, compute_step_stats
from cohort.ranks.groups import GroupMover
from cohort.rollout.producer import Producer
from cohort.run.job import TrainingRun, make_step_record
from cohort.types import Group


def train(
    run: TrainingRun,
    config: RL,
    producer: Producer,
    learner: Learner,
    sync: WeightSync,
    algo: Algorithm,
    reuse: RolloutReuse,
    mover: GroupMover,
) -> None:
    """Trains for every remaining step of `run`: samples, scores, updates the weights, and sends them to the engine.

    `producer` samples and scores, `learner` updates, `sync` sends the weights, `algo` accepts groups and computes
    advantages and loss, `reuse` adds groups of earlier steps, `mover` brings groups to other ranks if there are any.
    """
    for step in run.steps():
        # Sample and score. Groups that the algorithm does not accept are replaced by groups of further prompts.
        groups = producer.collect(config.batch.prompts, accept=algo.accept)
        # An engine with memory of its own gives it up until it gets new weights.
        sync.free_memory()
        # Groups of earlier steps, if the config asks for them (replay.prompts).
        groups += reuse.draw(step)
        # Every rank gets about as many tokens to train on. One process keeps what it has.
        groups = mover.divide(groups, config.learner.minibatches)
        groups, stats = update_policy(learner, algo, groups, config.learner)
        # These prompts are finished: a checkpoint need not bring them back.
        producer.close_groups(groups)
        # Nothing is copied if sampler and learner share the storage of the weights. Else the load is proved.
        sync.send(version=step + 1)
        # The first rank logs, and all evaluate and save a checkpoint when they are due.
        metrics = stats.metrics | sync.metrics | mover.metrics
        run.end_step(step, make_step_record(step, mover.collect_on_first(groups), metrics))


def update_policy(
    learner: Learner, algo: Algorithm, groups: list[Group], config: LearnerConfig
) -> tuple[list[Group], StepStats]:
    """Updates the weights on one batch of scored groups. Returns the groups and the metrics of the step.

    The groups are changed in place: log-probabilities of the learner, advantages, masked samples and excluded groups.
    The algorithm's coefficients are adjusted if they have targets. `cohort replay` calls it on groups that it read from
    a rollout file.
    """
    # Baselines and metrics are over the groups of all ranks.
    world = learner.world
    # Log-probabilities under the policy before the update and under the reference, if the algorithm needs them.
    annotate(learner, groups, algo.needs())
    # Sets advantages. No group is dropped silently: each excluded group and masked sample keeps its reason.
    groups = algo.advantages(groups, world)
    # Log-probabilities that only the loss needs, of the samples that train.
    annotate(learner, groups, algo.loss_needs())
    # At most epochs x minibatches optimizer steps. Microbatches only bound the memory.
    batch = make_batch(groups, config.minibatches, whole_groups=algo.whole_groups, world=world)
    update = learner.update(batch, algo)
    store_update(groups, update)
    # Adjusts the KL and entropy coefficients for the next step, if they have targets.
    metrics = update.metrics | algo.update_coefficients(update.metrics)
    return groups, compute_step_stats(groups, metrics, world, algo.credit)
