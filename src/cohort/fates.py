"""What became of a sample or a group on its way into the update: one enumeration, used everywhere.

The producer of rollouts sets NOT_ACCEPTED (and, once rollouts may be older than the weights, STALE), the algorithm sets
the others. Everybody else only reads. The values are what run.db and the rollout files hold.
"""

from __future__ import annotations

from enum import StrEnum


class Fate(StrEnum):
    """TRAINED is the empty string, so `if group.excluded:` reads as it should."""

    TRAINED = ""
    CONSTANT_REWARD = "constant reward"  # every sample of the group was paid the same: its gradient is zero
    NO_GAIN = "no gain"  # no sample of the group has an advantage, although their rewards differ
    EQUAL_REWARDS = "equal rewards"  # as CONSTANT_REWARD, but left out of the mean by choice (algo.dead = drop)
    TOO_FEW = "too few scored samples"  # the baseline needs more samples than could be scored
    NOT_ACCEPTED = "not accepted"  # another prompt was sampled in its place
    STALE = "stale"  # sampled by a policy that is older than the bound allows
    TRUNCATED = "truncated"  # a sample cut at max_tokens, left out of the loss by choice
    FAILED = "failed"  # a sample that could not be scored

    @property
    def counts(self) -> bool:
        """Whether the samples of such a group stay in the denominators: their gradient is zero, their share is not."""
        return self in (Fate.TRAINED, Fate.CONSTANT_REWARD, Fate.NO_GAIN)

    @property
    def by_algorithm(self) -> bool:
        """Whether the algorithm decides it, and so decides it again when it sees the group again."""
        return self not in (Fate.NOT_ACCEPTED, Fate.STALE)
