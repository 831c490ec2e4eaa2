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
from cohort.run.job import StepRecord, TrainingRun
from cohort.types import Group, Provenance


def train(
    run: TrainingRun, learner: Learner, loss: PreferenceLoss, pairs: Callable[[int], list[Group]], minibatches: int
) -> None:
    """Trains for every remaining step of `run`. `pairs(step)` returns the pairs of a step, counted from 0."""
    for step in run.steps():
        groups = pairs(step)
        # Log-probabilities under the reference, unless the loss has none or they are stored with the pairs.
        annotate(learner, groups, loss.needs(groups), Provenance.TARGET)
        update = learner.update(make_pair_batch(groups, minibatches), loss)
        store_update(groups, update)
        # Logs, and measures and saves a checkpoint when they are due.
        run.end_step(step, StepRecord(metrics=update.metrics, groups=groups))


def make_pair_batch(groups: Sequence[Group], minibatches: int = 1) -> Batch:
    """Returns the batch of one step: pairs that are never split, with the loss on given tokens."""
    return make_batch(groups, minibatches, Provenance.TARGET, whole_groups=True)
