"""GRPO and what differs from it only by settings.

Not as in the paper (arXiv:2402.03300): the reference policy is optional and off by default, truncated samples
may be masked, the mean (token, sequence, constant) is a choice, and clip_low and clip_high are separate.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cohort.algos.advantages import advantages, is_constant
from cohort.algos.aggregate import token_weights
from cohort.algos.algorithm import algorithm
from cohort.algos.inputs import LossInputs
from cohort.algos.kl import kl_of_sample
from cohort.algos.loss import PolicyLoss
from cohort.algos.tally import Tally
from cohort.config.schema import GRPO
from cohort.types import Finish, Group, Provenance, Sample

CONSTANT = "constant reward"
TOO_FEW = "too few scored samples"
TRUNCATED = "truncated"
FAILED = "failed"


@algorithm("grpo", "dr_grpo")
class GroupRelative:
    """Advantages relative to the group, clipped ratio per token."""

    per_token: ClassVar[bool] = True

    def __init__(self, config: GRPO, max_tokens: int) -> None:
        self.config, self.max_tokens = config, max_tokens
        self._kl_in_loss = config.kl if config.kl_in == "loss" else 0.0
        self._kl_in_reward = config.kl if config.kl_in == "reward" else 0.0
        self._loss = PolicyLoss(
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl=self._kl_in_loss,
            kl_estimator=config.kl_estimator,
            entropy=config.entropy,
        )

    def needs(self, num_updates: int) -> frozenset[str]:
        """Old logprobs if the policy moves between rollout and last update, or the reward contains the KL."""
        old = num_updates > 1 or self._kl_in_reward != 0.0
        return frozenset({"old"} if old else ()) | frozenset({"ref"} if self.config.kl else ())

    def accept(self, group: Group) -> bool:
        """Every group: GRPO does not resample."""
        return True

    def advantages(self, groups: list[Group]) -> list[Group]:
        """A group excluded for a reason of somebody else's keeps it and gets no advantages."""
        for group in groups:
            self._grade(group)
        return groups

    def weigh(self, lengths: Tensor, num_tokens: float, num_samples: float) -> Tensor:
        counts = {"num_tokens": num_tokens, "num_samples": num_samples}
        return token_weights(lengths, self.config.aggregate, max_tokens=self.max_tokens, **counts)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        return self._loss(inputs)

    def returned(self, sample: Sample) -> float:
        """The number the baseline sees: the reward after truncation penalty and KL. `sample.reward` stays."""
        assert sample.reward is not None, "a sample is neither scored nor failed"
        reward = sample.reward
        if self.config.truncated == "penalize" and sample.finish == Finish.LENGTH:
            reward = min(reward, 0.0)  # a task that pays -1 for a wrong answer must not reward running out
        if self._kl_in_reward:
            reward -= self._kl_in_reward * self._divergence(sample)
        return reward

    def _divergence(self, sample: Sample) -> float:
        if not sample.num_sampled:
            return 0.0  # nothing was said, nothing was annotated
        old, ref = sample.old_logprobs, sample.ref_logprobs
        assert old is not None and ref is not None, "KL in the reward: annotate before advantages"
        at = [i for i, p in enumerate(sample.provenance) if p == Provenance.SAMPLED]
        return kl_of_sample([old[i] for i in at], [ref[i] for i in at], self.config.kl_estimator)

    def _grade(self, group: Group) -> None:
        if group.excluded in (CONSTANT, TOO_FEW):
            group.excluded = ""  # graded before, perhaps with other settings
        for sample in group.samples:
            sample.advantage = 0.0
            if sample.masked in ("", TRUNCATED, FAILED):
                sample.masked = self._mask(sample)
        if group.excluded:
            return
        scored = [s for s in group.samples if not s.failure]
        returns = [self.returned(s) for s in scored]
        for sample, advantage in zip(scored, advantages(returns, self.config.scale), strict=True):
            sample.advantage = advantage
        if len(scored) < 2:
            group.excluded = TOO_FEW
        elif is_constant(returns) and not self._kl_in_loss and not self.config.entropy:
            group.excluded = CONSTANT  # exact: every term of the loss has a zero gradient

    def _mask(self, sample: Sample) -> str:
        if sample.failure:
            return FAILED
        cut = self.config.truncated == "mask" and sample.finish == Finish.LENGTH
        return TRUNCATED if cut else ""
