"""Pairs from a reward: of every group the better and the worse sample, compared by a loss on pairs (online DPO).

A pair is two samples of a group whose rewards differ. The better one has the advantage 1, the worse one -1; all other
samples are masked as "in no pair". The losses are those on given pairs (`cohort.algos.preferences`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from cohort.algos.advantages import is_constant
from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.inputs import LossInputs
from cohort.algos.loss import measure_policies
from cohort.algos.policy import GroupAlgorithm
from cohort.algos.preferences import PreferenceLoss
from cohort.algos.tally import Tally
from cohort.config.algos import PairPolicy
from cohort.config.preferences import PairLoss
from cohort.fates import Fate
from cohort.types import Group
from cohort.world import ONE_PROCESS, World

# Begins the names of the metrics of implicit rewards. The rewards of the task are "reward/...".
IMPLICIT = "implicit"


class PairOfSamples(NamedTuple):
    """Indices of two samples of a group."""

    better: int
    worse: int


class PairedAlgorithm(GroupAlgorithm):
    """An algorithm that forms one pair per group from the rewards, and trains on it with a loss on pairs."""

    per_token = False
    # For the metrics: how far the policy has moved in this step, and how far the sampler is from it.
    has_ratio = True
    whole_groups = True

    def __init__(self, config: PairPolicy, max_tokens: int) -> None:
        super().__init__(config, max_tokens)
        assert isinstance(config, PairLoss), f"{type(config).__name__} has no loss on pairs"
        self._pairs = config.pairs
        self._refills = config.dead == "refill"
        self._has_reference = config.has_reference
        self._loss = PreferenceLoss(config, IMPLICIT)

    def needs(self) -> frozenset[str]:
        """Returns no names: rewards alone decide about pairs."""
        return frozenset()

    def loss_needs(self) -> frozenset[str]:
        """Returns {"ref"} if the loss compares with a reference. Only samples of pairs need it."""
        return frozenset({"ref"} if self._has_reference else ())

    @property
    def advantage_description(self) -> str:
        """Which samples are compared, as text for a report."""
        which = "the best and the worst sample" if self._pairs == "best_worst" else "two samples of different reward"
        return f"{which} of a group are a pair: 1 for the better one, -1 for the worse one"

    def accept(self, group: Group) -> bool:
        """Returns False for a group to be replaced by one of another prompt: it has no pair, and algo.dead = refill."""
        return not self._refills or self._find_fate(group, self._list_candidates(group)) is Fate.TRAINED

    def advantages(self, groups: list[Group], world: World = ONE_PROCESS) -> list[Group]:
        """Forms one pair per group: sets advantages and masks of samples and `excluded` of groups, in place.

        Returns `groups`. A group that other code excluded (not accepted, stale) keeps its fate. No rank depends on
        another one, so `world` is not used. Samples must be scored or failed.
        """
        for group in groups:
            for sample in group.samples:
                sample.advantage = 0.0
                sample.token_advantages = None
                sample.masked = self.choose_mask(sample)
            if group.excluded.is_set_by_algorithm:
                candidates = self._list_candidates(group)
                group.excluded = self._find_fate(group, candidates)
                if not group.excluded:
                    self._store_pair(group, self._choose_pair(group, candidates))
        return groups

    def _list_candidates(self, group: Group) -> list[int]:
        """Returns the indices of the samples that can be in a pair: scored, not masked, with a sampled token."""
        usable = (not self.choose_mask(s) and s.num_sampled > 0 for s in group.samples)
        return [i for i, is_usable in enumerate(usable) if is_usable]

    def _find_fate(self, group: Group, candidates: Sequence[int]) -> Fate:
        """Returns why a group has no pair: fewer than two candidates, or equal rewards. TRAINED = it has one."""
        if len(candidates) < 2:
            return Fate.TOO_FEW
        returns = [self.compute_returns(group.samples[i])[0] for i in candidates]
        return Fate.EQUAL_REWARDS if is_constant(returns) else Fate.TRAINED

    def _choose_pair(self, group: Group, candidates: Sequence[int]) -> PairOfSamples:
        """Returns the pair of a group, as algo.pairs says. At least two candidates have different returns."""
        returns = {i: self.compute_returns(group.samples[i])[0] for i in candidates}
        if self._pairs == "best_worst":
            # Of equal samples the first one: they were drawn independently, so that no order is better than another.
            return PairOfSamples(max(candidates, key=returns.__getitem__), min(candidates, key=returns.__getitem__))
        ordered = [PairOfSamples(i, j) for i in candidates for j in candidates if returns[i] > returns[j]]
        return ordered[_draw_index(group, len(ordered))]

    @staticmethod
    def _store_pair(group: Group, pair: PairOfSamples) -> None:
        """Writes the advantages of a pair into its samples, and masks the other samples of the group."""
        for i, sample in enumerate(group.samples):
            if i not in pair and sample.masked is Fate.TRAINED:
                sample.masked = Fate.UNPAIRED
        group.samples[pair.better].advantage = 1.0
        group.samples[pair.worse].advantage = -1.0

    def weigh_tokens(self, lengths: Lengths, totals: Totals) -> Tensor:
        """Returns the same token weight [N] for every token: one over the number of pairs of all ranks."""
        return self._loss.weigh_tokens(lengths, totals)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        """Returns the part of the loss that the pairs of a microbatch have (0-d), and their metrics."""
        loss, tally = self._loss.loss(inputs)
        old = inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
        measure_policies(inputs, old, tally)
        return loss, tally


def _draw_index(group: Group, num: int) -> int:
    """Returns a number from 0 to `num` - 1 that depends on the group's prompt and its visit alone."""
    prompt = group.prompt
    key = f"{prompt.task}\n{prompt.id}\n{prompt.visit}".encode(errors="surrogateescape")
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % num
