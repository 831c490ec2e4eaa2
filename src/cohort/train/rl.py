"""The reinforcement-learning loop: the algorithm on one screen.

    cohort train RECIPE             one process
    cohort resume RUN               the same loop, from the last checkpoint

It is synchronous: every group is sampled from the weights it then trains, so the importance ratio is exactly 1
until a batch is reused (learner.epochs, learner.minibatches > 1). Only `replay` brings in groups of older weights.
"""

from __future__ import annotations

from cohort.algos.algorithm import Algorithm
from cohort.config.schema import LearnerConfig
from cohort.data.pack import pack
from cohort.engines.sync import WeightSync
from cohort.learner.base import Learner
from cohort.rollout.producer import Producer
from cohort.train.replay import Replay
from cohort.train.run import Run
from cohort.train.stats import StepStats, step_stats
from cohort.types import Group


def train(run: Run, producer: Producer, learner: Learner, sync: WeightSync, algo: Algorithm, replay: Replay) -> None:
    """Run every remaining step of `run`."""
    num_prompts, config = run.config.batch.prompts, run.config.learner
    for step in run.steps():
        groups = producer.collect(num_prompts, accept=algo.accept)
        groups += replay.draw(step)  # of earlier steps, where asked for
        groups, stats = improve(learner, algo, groups, config)
        producer.settle(groups)  # none is open: a checkpoint of this step needs the cursor alone
        sync.send(version=step + 1)  # no copy when storage is shared
        run.end_step(step, groups, stats)  # log, evaluate, checkpoint


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
