"""The numbers of one step, from everyone who has some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cohort.algos.account import account
from cohort.data.batch import Batch
from cohort.train.stats import StepStats, rollout_metrics
from cohort.types import Group


def step_stats(groups: Sequence[Group], batch: Batch, update: Mapping[str, float]) -> StepStats:
    """Rewards and lengths of the rollout, fates of groups and samples, shape of the packs, the learner's update."""
    micros = [m for minibatch in batch.minibatches for m in minibatch.microbatches]
    packs = {"pack/microbatches": float(len(micros)), "pack/tokens": float(sum(len(m.tokens) for m in micros))}
    return StepStats(metrics={**rollout_metrics(groups), **account(groups), **packs, **update})
