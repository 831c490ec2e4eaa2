"""Every algorithm of the family: its advantages, its exclusions, its loss, from its settings alone.

They differ by the registered policy loss (`cohort.algos.surrogates`) and by defaults (`cohort.config.algos`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from cohort.algos.advantages import is_constant
from cohort.algos.aggregate import Lengths, Totals, token_weights
from cohort.algos.control import Weights
from cohort.algos.estimators import find_estimator
from cohort.algos.inputs import LossInputs
from cohort.algos.kl import kl_of_sample
from cohort.algos.loss import PolicyLoss
from cohort.algos.surrogates import find_surrogate
from cohort.algos.tally import Tally
from cohort.config.algos import ALGOS, DAPO, CorrectionConfig, KLConfig, Policy
from cohort.fates import Fate
from cohort.serialize import record
from cohort.types import Finish, Group, Provenance, Sample
from cohort.world import ONE_PROCESS, World


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class PlainAlgorithm:
    """An algorithm as it travels: its settings and its state."""

    config: Policy
    max_tokens: int
    state: dict[str, float]


for _cls in (KLConfig, CorrectionConfig, *ALGOS.values()):
    record(_cls)


class PolicyGradient:
    """An algorithm as its config describes it; `max_tokens` is the longest completion, the constant divisor."""

    has_ratio = True

    def __init__(self, name: str, config: Policy, max_tokens: int) -> None:
        self.config, self.max_tokens = config, max_tokens
        self.weights = Weights.of(config)
        self._surrogate = find_surrogate(name)
        self._estimator = find_estimator(name)
        self._least = 2 if config.needs_siblings else 1  # scored samples a group needs
        self.per_token = self._surrogate.per_token and config.correction.level == "token"

    def needs(self) -> frozenset[str]:
        """Old logprobs if the reward contains the KL, the reference's if it is to the reference."""
        kl = self.config.kl
        old = kl.weight and kl.place == "reward"
        ref = kl.weight and kl.to == "reference"
        return frozenset({"old"} if old else ()) | frozenset({"ref"} if ref else ())

    def accept(self, group: Group) -> bool:
        """Every group, unless dead ones are to be replaced: by what the task paid, not by penalties for length."""
        if self.config.dead != "refill":
            return True
        return not self._is_dead([s.reward for s in group.samples if s.reward is not None and not s.failure])

    def _is_dead(self, rewards: list[float]) -> bool:
        return self._estimator.is_dead(rewards, self.config)

    def advantages(self, groups: list[Group], world: World = ONE_PROCESS) -> list[Group]:
        """A group excluded for a reason of somebody else's keeps it and gets no advantages."""
        graded: list[tuple[Group, list[float]]] = []  # with the returns of its scored samples
        for group in groups:
            for sample in group.samples:
                sample.advantage = 0.0
                sample.token_advantages = None
                sample.masked = self._mask(sample)
            if group.excluded.by_algorithm:
                returns = [self.returned(s) for s in group.samples if not s.failure]
                # it may have been graded before, with other settings
                group.excluded = Fate.TRAINED if len(returns) >= self._least else Fate.TOO_FEW
                graded += [] if group.excluded else [(group, returns)]
        for (group, returns), found in zip(graded, self._found([r for _, r in graded], world), strict=True):
            self._grade(group, returns, found)
        return groups

    def _found(self, returns: list[list[float]], world: World) -> list[list[float]]:
        """Advantages of this rank's groups, from the returns of their samples."""
        everywhere = world.gather(returns)
        first = sum(map(len, everywhere[: world.rank]))  # of this rank's groups among all
        found = self._estimator.advantages([row for part in everywhere for row in part], self.config)
        return found[first : first + len(returns)]

    @property
    def judging(self) -> str:
        """How samples are judged, in words."""
        return self._estimator.words(self.config)

    def weigh(self, lengths: Lengths, totals: Totals) -> Tensor:
        return token_weights(lengths, self.config.aggregate, totals, self.max_tokens)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        kl, entropy = self.weights.kl, self.weights.bonus
        return PolicyLoss(surrogate=self._surrogate, config=self.config, kl=kl, entropy=entropy)(inputs)

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Steer the weights by what a step measured; returns those that were in force."""
        used = {}
        if self.config.kl.target:
            used["kl/weight"] = self.weights.kl
        if self.config.entropy_target:
            used["entropy/weight"] = self.weights.bonus
        self.weights.observe(self.config, metrics)
        return used

    def plain(self) -> PlainAlgorithm:
        return PlainAlgorithm(config=self.config, max_tokens=self.max_tokens, state=self.state())

    def state(self) -> dict[str, float]:
        return asdict(self.weights)

    def load_state(self, state: Mapping[str, float]) -> None:
        self.weights = Weights(**state)  # type: ignore[arg-type]

    def returned(self, sample: Sample) -> float:
        """The number the baseline sees: the reward after truncation, length and KL. `sample.reward` stays."""
        reward = self._shaped(sample)
        if self.weights.kl and self.config.kl.place == "reward":
            reward -= self.weights.kl * self._divergence(sample)
        return reward

    def _shaped(self, sample: Sample) -> float:
        assert sample.reward is not None, "a sample is neither scored nor failed"
        reward = sample.reward
        if self.config.truncated == "penalize" and sample.finish == Finish.LENGTH:
            reward = min(reward, 0.0)  # a task that pays -1 for a wrong answer must not reward running out
        if isinstance(self.config, DAPO) and self.config.overlong:
            cut = sample.finish == Finish.LENGTH  # in whichever turn
            reward -= 1.0 if cut else overlong_penalty(sample.num_sampled, self.max_tokens, self.config.overlong)
        return reward

    def _divergence(self, sample: Sample) -> float:
        if not sample.num_sampled:
            return 0.0  # nothing was said, nothing was annotated
        kl, old = self.config.kl, sample.old_logprobs
        other = sample.sampler_logprobs if kl.to == "sampler" else sample.ref_logprobs
        assert old is not None and other is not None, "KL in the reward: annotate before advantages"
        at = [i for i, p in enumerate(sample.provenance) if p == Provenance.SAMPLED]
        return kl_of_sample([old[i] for i in at], [other[i] for i in at], kl.estimator)

    def _grade(self, group: Group, returns: list[float], found: Sequence[float]) -> None:
        scored = (s for s in group.samples if not s.failure)
        for sample, advantage in zip(scored, found, strict=True):
            sample.advantage = advantage
        if self.config.dead == "drop" and self._is_dead(returns):
            group.excluded = Fate.EQUAL_REWARDS
        elif not any(found) and not self._always_trains:  # exact: every term of the loss has a zero gradient
            group.excluded = Fate.CONSTANT_REWARD if is_constant(returns) else Fate.NO_GAIN

    @property
    def _always_trains(self) -> bool:
        """Whether a token without advantage has a gradient."""
        kl = self.config.kl
        return bool((kl.weight and kl.place == "loss") or self.config.entropy or self.config.entropy_target)

    def _mask(self, sample: Sample) -> Fate:
        if sample.failure:
            return Fate.FAILED
        cut = self.config.truncated == "mask" and sample.finish == Finish.LENGTH
        return Fate.TRUNCATED if cut else Fate.TRAINED


def overlong_penalty(length: int, max_tokens: int, share: float) -> float:
    """From 0 to 1 over the last `share` of the permitted length (DAPO, equation 13).

    >>> [overlong_penalty(n, 100, 0.2) for n in (80, 90, 100)]
    [0.0, 0.5, 1.0]
    """
    buffer = share * max_tokens
    return min(1.0, max(0.0, (length - (max_tokens - buffer)) / buffer))
