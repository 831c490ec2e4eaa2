"""The enumeration of fates: what became of a sample or a group on its way into the update.

The producer of rollouts sets NOT_ACCEPTED (and STALE, once rollouts may be older than the weights). The algorithm sets
the others. All other code only reads fates. run.db and the rollout files store the values.
"""

from __future__ import annotations

from enum import StrEnum


class Fate(StrEnum):
    """What became of a sample or group. TRAINED is the empty string, so `if group.excluded:` is false for it."""

    TRAINED = ""
    CONSTANT_REWARD = "constant reward"  # every sample of the group has the same reward: its gradient is zero
    NO_GAIN = "no gain"  # no sample of the group has an advantage, although their rewards differ
    EQUAL_REWARDS = "equal rewards"  # as CONSTANT_REWARD, but left out of the mean by choice (algo.dead = drop)
    TOO_FEW = "too few scored samples"  # a baseline or a pair needs more samples than could be scored
    NOT_ACCEPTED = "not accepted"  # another prompt was sampled in its place
    STALE = "stale"  # sampled by a policy that is older than the bound allows
    TRUNCATED = "truncated"  # a sample cut at max_tokens, left out of the loss by choice
    FAILED = "failed"  # a sample that could not be scored
    UNPAIRED = "in no pair"  # a sample that is neither the better nor the worse one of its group's pair

    @property
    def is_counted(self) -> bool:
        """Whether the samples of a group with this fate count in the denominators of the loss.

        TRAINED, CONSTANT_REWARD and NO_GAIN count. A group without gradient adds nothing to the sum, but the mean is
        over it too. It is not meant for fates of single samples (FAILED, TRUNCATED, UNPAIRED).
        """
        return self in (Fate.TRAINED, Fate.CONSTANT_REWARD, Fate.NO_GAIN)

    @property
    def is_set_by_algorithm(self) -> bool:
        """Whether the algorithm sets this fate. If so, it decides anew at the next call; else it keeps the fate."""
        return self not in (Fate.NOT_ACCEPTED, Fate.STALE)
