"""The one class behind every policy gradient: advantages, exclusions and loss, from the settings alone.

They differ by their registered policy loss (`cohort.algos.surrogates`) and by defaults (`cohort.config.algos`). What
they share with algorithms that compare samples in pairs (`cohort.algos.pairing`) is in `GroupAlgorithm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from cohort.algos.advantages import is_constant
from cohort.algos.aggregate import Lengths, Totals, token_weights
from cohort.algos.control import Coefficients
from cohort.algos.credit import CreditRule, TurnReturns, collect_by_turn, estimate_by_turn, store_advantages
from cohort.algos.estimators import find_estimator
from cohort.algos.inputs import LossInputs
from cohort.algos.kl import kl_of_sample
from cohort.algos.loss import PolicyLoss
from cohort.algos.surrogates import RegisteredSurrogate
from cohort.algos.tally import Tally
from cohort.config.algo_sections import CorrectionConfig, CreditConfig, KLConfig
from cohort.config.algos import ALGOS, DAPO, Policy
from cohort.fates import Fate
from cohort.serialize import record
from cohort.types import Group, Sample
from cohort.world import ONE_PROCESS, World


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class PlainAlgorithm:
    """An algorithm as a record that can be sent: its settings and its state."""

    config: Policy
    max_tokens: int
    state: dict[str, float]


# A PlainAlgorithm holds these configs, so they must be serialisable too.
for _cls in (KLConfig, CorrectionConfig, CreditConfig, *ALGOS.values()):
    record(_cls)


class GroupAlgorithm:
    """What all algorithms share: returns of samples, masks, coefficients, and their state.

    `max_tokens` is the longest completion, a constant divisor.
    """

    def __init__(self, config: Policy, max_tokens: int) -> None:
        self.config, self.max_tokens = config, max_tokens
        self.coefficients = Coefficients.from_config(config)
        self.credit = CreditRule.from_config(config.credit)

    def update_coefficients(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adjusts the KL and entropy coefficients that have targets, by the metrics of a step, for the next step.

        Returns the values that were used in that step, as "kl/weight" and "entropy/weight"; a coefficient without a
        target is left out.
        """
        used = {}
        if self.config.kl.target:
            used["kl/weight"] = self.coefficients.kl
        if self.config.entropy_target:
            used["entropy/weight"] = self.coefficients.active_entropy
        self.coefficients.update(self.config, metrics)
        return used

    def to_record(self) -> PlainAlgorithm:
        """Returns settings, `max_tokens` and coefficients as a record that can be sent to another process."""
        return PlainAlgorithm(config=self.config, max_tokens=self.max_tokens, state=self.state())

    def state(self) -> dict[str, float]:
        """Returns the fields of `coefficients` by name (kl, entropy, low_entropy), which a checkpoint stores."""
        return asdict(self.coefficients)

    def load_state(self, state: Mapping[str, float]) -> None:
        """Replaces the coefficients by those that `state` returned."""
        self.coefficients = Coefficients(**state)  # type: ignore[arg-type]

    def compute_returns(self, sample: Sample) -> list[float]:
        """Returns the numbers from which advantages are computed: rewards after all penalties, one per turn or one.

        Penalties are, where the config asks for them, those for truncation, for length (DAPO) and for the KL. With
        credit per turn, those for truncation and length change the reward of the last turn, and each turn pays for its
        own KL. The return of a turn has the discounted rewards of later turns in it. `sample.reward` is not changed; it
        must not be None.
        """
        rewards = self.credit.split_reward(sample)
        rewards[-1] = self._shape_reward(sample, rewards[-1])
        if self.coefficients.kl and self.config.kl.place == "reward":
            divergences = [self._compute_kl(sample, span) for span in self.credit.find_spans(sample)]
            rewards = [r - self.coefficients.kl * kl for r, kl in zip(rewards, divergences, strict=True)]
        return self.credit.sum_rewards(rewards)

    def _shape_reward(self, sample: Sample, reward: float) -> float:
        """Returns a reward of the sample after the penalties for truncation and length that the config asks for.

        `reward` is that of the whole sample or of its last turn. If the sample is truncated, it becomes at most 0 if
        algo.truncated = penalize. With DAPO's `overlong` a penalty of 0 to 1 is subtracted: 1 for a truncated sample,
        otherwise `overlong_penalty` of the number of sampled tokens, over all turns.
        """
        if self.config.truncated == "penalize" and sample.is_truncated:
            # At most 0, not 0: where a task gives -1 for a wrong answer, a truncated one must not be better.
            reward = min(reward, 0.0)
        if isinstance(self.config, DAPO) and self.config.overlong:
            # A sample cut in any of its turns gets the full penalty.
            cut = sample.is_truncated
            reward -= 1.0 if cut else overlong_penalty(sample.num_sampled, self.max_tokens, self.config.overlong)
        return reward

    def _compute_kl(self, sample: Sample, places: Sequence[int]) -> float:
        """Returns the KL of the current policy to the reference or the sampler, summed over the tokens at `places`.

        It is 0 if there are none. Otherwise the sample must have the log-probabilities that `needs` names.
        """
        # The learner annotates no sample without sampled tokens.
        if not places:
            return 0.0
        kl, old = self.config.kl, sample.old_logprobs
        other = sample.sampler_logprobs if kl.to == "sampler" else sample.ref_logprobs
        assert old is not None and other is not None, "KL in the reward: annotate before advantages"
        return kl_of_sample([old[i] for i in places], [other[i] for i in places], kl.estimator)

    def choose_mask(self, sample: Sample) -> Fate:
        """Returns why a sample is left out of the loss (FAILED or TRUNCATED), or TRAINED if it is not.

        TRUNCATED is only for a sample that ended at the limit of tokens, if algo.truncated = mask.
        """
        if sample.failure:
            return Fate.FAILED
        cut = self.config.truncated == "mask" and sample.is_truncated
        return Fate.TRUNCATED if cut else Fate.TRAINED


class PolicyGradient(GroupAlgorithm):
    """The algorithm that a config describes. `surrogate` is its policy loss."""

    has_ratio = True
    whole_groups = False

    def __init__(self, config: Policy, max_tokens: int, surrogate: RegisteredSurrogate) -> None:
        super().__init__(config, max_tokens)
        self._surrogate = surrogate
        self._estimator = find_estimator(config)
        self._min_scored = 2 if config.needs_siblings else 1  # scored samples that a group must have
        # A correction by whole samples needs all tokens of a sample at once, whatever the policy loss is.
        self.per_token = self._surrogate.per_token and config.correction.level == "token"

    def needs(self) -> frozenset[str]:
        """Returns which log-probabilities samples must have before `advantages`: a subset of {"old", "ref"}.

        "old" (by the current policy) is there if the KL is part of the reward, "ref" if the KL is to the reference
        policy. If algo.kl.weight is 0, the result is empty.
        """
        kl = self.config.kl
        old = kl.weight and kl.place == "reward"
        ref = kl.weight and kl.to == "reference"
        return frozenset({"old"} if old else ()) | frozenset({"ref"} if ref else ())

    def loss_needs(self) -> frozenset[str]:
        """Returns no names: what the loss needs is computed before advantages, by `needs`."""
        return frozenset()

    def accept(self, group: Group) -> bool:
        """Returns False for a group to be replaced by one of another prompt: a dead group, if algo.dead = refill.

        A group is dead if its samples' rewards give no gradient: all are equal, or for pass_at_k no sample adds to the
        best of k. With credit per turn it is dead only if every turn is. The rewards are those of scored samples,
        before the penalties of this algorithm; a group without scored samples is dead. With other values of algo.dead
        the result is always True.
        """
        if self.config.dead != "refill":
            return True
        scored = [s for s in group.samples if s.reward is not None and not s.failure]
        return not self._is_dead([self.credit.compute_returns(s) for s in scored])

    def _is_dead(self, returns: Sequence[Sequence[float]]) -> bool:
        """Returns whether a group whose scored samples have these returns gets no gradient from its advantages.

        `returns` has one list per sample, with one return per turn or one for all. Every turn must be dead: too few
        samples reached it, or the estimator says so, because all returns are equal or, for pass_at_k, no sample adds to
        the best of k.
        """
        turns = collect_by_turn(returns)
        return all(len(row) < self._min_scored or self._estimator.is_dead(row, self.config) for row in turns)

    def advantages(self, groups: list[Group], world: World = ONE_PROCESS) -> list[Group]:
        """Sets advantages and masks of all samples and `excluded` of groups, in place, and returns `groups`.

        Values of earlier calls are replaced. `token_advantages` is set where credit per turn gives the turns of a
        sample different advantages, otherwise it is None; see `store_advantages`. Failed samples, and samples of groups
        with too few scored ones, get advantage 0. A group that other code excluded (not accepted, stale) keeps its fate
        and gets advantages 0. `world` has the ranks that train together, which must all call this. Samples must be
        scored or failed, and have the log-probabilities that `needs` names.
        """
        graded: list[tuple[Group, list[list[float]]]] = []  # (group, returns of its scored samples)
        for group in groups:
            # Samples may carry values of an earlier call, with other settings: everything is set anew.
            for sample in group.samples:
                sample.advantage = 0.0
                sample.token_advantages = None
                sample.masked = self.choose_mask(sample)
            if group.excluded.is_set_by_algorithm:
                returns = [self.compute_returns(s) for s in group.samples if not s.failure]
                group.excluded = Fate.TRAINED if len(returns) >= self._min_scored else Fate.TOO_FEW
                graded += [] if group.excluded else [(group, returns)]
        estimates = self._estimate_advantages([returns for _, returns in graded], world)
        for (group, returns), group_advantages in zip(graded, estimates, strict=True):
            self._store_advantages(group, returns, group_advantages)
        return groups

    def _estimate_advantages(self, returns: TurnReturns, world: World) -> list[list[list[float]]]:
        """Returns the advantages of this rank's groups, in the shape of `returns`.

        `returns` has one list per group, with the returns of each scored sample. The groups of all ranks are taken into
        account, so every rank must call it.
        """
        returns_by_rank = world.gather(returns)
        # The estimator sees the groups of all ranks, in rank order; this rank's groups begin at `first`.
        first = sum(map(len, returns_by_rank[: world.rank]))
        estimates = estimate_by_turn(
            [group for part in returns_by_rank for group in part],
            lambda rows: self._estimator.advantages(rows, self.config),
            self._min_scored,
        )
        return estimates[first : first + len(returns)]

    @property
    def advantage_description(self) -> str:
        """How advantages are computed, as text for a report. An example is "baseline = mean, scale = std"."""
        discount = f" with discount {self.credit.discount:g}" if self.credit.discount != 1 else ""
        return self._estimator.describe(self.config) + (f", credit per turn{discount}" if self.credit.by_turn else "")

    def weigh_tokens(self, lengths: Lengths, totals: Totals) -> Tensor:
        """Returns the token weights [N] of a microbatch: the factor of each token's loss term, by algo.aggregate."""
        return token_weights(lengths, self.config.aggregate, totals, self.max_tokens)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        """Returns the weighted sum of the tokens' loss terms (0-d) and their metrics, with the current coefficients.

        Terms are the policy loss and, where their coefficients are not 0, KL (unless it is in the reward) and entropy.
        """
        kl, entropy = self.coefficients.kl, self.coefficients.active_entropy
        loss = PolicyLoss(surrogate=self._surrogate, config=self.config, kl_coefficient=kl, entropy_coefficient=entropy)
        return loss(inputs)

    def _store_advantages(
        self, group: Group, returns: Sequence[Sequence[float]], advantages: Sequence[Sequence[float]]
    ) -> None:
        """Writes the advantages into the scored samples. Sets `group.excluded` if the group is dead or has no gradient.

        It is excluded as EQUAL_REWARDS if it is dead and algo.dead = drop; else, if all advantages are 0 and neither KL
        nor entropy is in the loss, as CONSTANT_REWARD or NO_GAIN. `returns` and `advantages` have one list per scored
        sample, in order, with one number per turn or one for all turns.
        """
        scored = (s for s in group.samples if not s.failure)
        for sample, row in zip(scored, advantages, strict=True):
            store_advantages(sample, row)
        if self.config.dead == "drop" and self._is_dead(returns):
            group.excluded = Fate.EQUAL_REWARDS
        # Excluded only where that changes nothing: every term of the loss has a gradient of exactly zero.
        elif not any(map(any, advantages)) and not self._trains_without_advantage:
            is_same = all(map(is_constant, collect_by_turn(returns)))
            group.excluded = Fate.CONSTANT_REWARD if is_same else Fate.NO_GAIN

    @property
    def _trains_without_advantage(self) -> bool:
        """Whether a token without advantage has a gradient: from the KL in the loss or from the entropy bonus."""
        kl = self.config.kl
        return bool((kl.weight and kl.place == "loss") or self.config.entropy or self.config.entropy_target)


def overlong_penalty(length: int, max_tokens: int, share: float) -> float:
    """Returns a penalty that rises from 0 to 1 over the last `share` of `max_tokens` (DAPO, equation 13).

    It is 0 for shorter and 1 for longer samples. `length` is the number of sampled tokens; `share` must be above 0.

    >>> [overlong_penalty(n, 100, 0.2) for n in (80, 90, 100)]
    [0.0, 0.5, 1.0]
    """
    buffer = share * max_tokens
    return min(1.0, max(0.0, (length - (max_tokens - buffer)) / buffer))
