"""The loop of preference optimisation, on one screen.

    cohort train tiny_dpo           starts it, in one process
    cohort resume RUN               continues it from the newest checkpoint

What it is: the batches and the learner of reinforcement learning, with pairs of given answers in place of groups of
sampled ones. What a step trains on is a pure function of its number.

What it is not: there is no sampling and no scoring. `run` logs, measures the held-out pairs and saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cohort.algos.preferences import PreferenceLoss
from cohort.data.batch import Batch
from cohort.data.pack import make_batch
from cohort.learner.base import Learner
from cohort.loops.learning import annotate, store_update
from cohort.ranks.groups import GroupMover
from cohort.run.job import StepRecord, TrainingRun
from cohort.types import Group, Provenance
from cohort.world import ONE_PROCESS, World


def train(
    run: TrainingRun,
    learner: Learner,
    loss: PreferenceLoss,
    pairs: Callable[[int], list[Group]],
    minibatches: int,
    mover: GroupMover,
) -> None:
    """Trains for every remaining step of `run`. `pairs(step)` returns the pairs of a step, counted from 0.

    Of several ranks each trains on a part of them, which `mover` chooses.
    """
    for step in run.steps():
        groups = mover.select(pairs(step), minibatches)
        # Log-probabilities under the reference, unless the loss has none or they are stored with the pairs.
        annotate(learner, groups, loss.needs(groups), Provenance.TARGET)
        update = learner.update(make_pair_batch(groups, minibatches, learner.world), loss)
        store_update(groups, update)
        # Logs, and measures and saves a checkpoint when they are due.
        run.end_step(step, StepRecord(metrics=update.metrics, groups=mover.collect_on_first(groups)))


def make_pair_batch(groups: Sequence[Group], minibatches: int = 1, world: World = ONE_PROCESS) -> Batch:
    """Returns the batch of one step: pairs that are never split, with the loss on given tokens.

    `groups` are the pairs of this rank of `world`.
    """
    return make_batch(groups, minibatches, Provenance.TARGET, whole_groups=True, world=world)
