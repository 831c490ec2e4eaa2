"""The clipped policy-gradient loss of PPO and GRPO, as a sum over weighted tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.algos.inputs import LossInputs
from cohort.algos.kl import Estimator, kl_per_token
from cohort.algos.tally import Tally


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Per sampled token: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl K - entropy H."""

    clip_low: float
    clip_high: float
    kl: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy: float = 0.0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        """The weighted sum, and what happened. The denominators are in `inputs.weights`."""
        x = inputs.in_loss()
        old = x.logprobs.detach() if x.old_logprobs is None else x.old_logprobs  # [T]
        ratio = torch.exp(x.logprobs - old)  # [T]
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        terms = -torch.minimum(ratio * x.advantages, clipped * x.advantages)
        tally = self._tally(x, old, ratio)
        tally.sum("loss/policy", x.weights * terms)
        if self.kl:
            assert x.ref_logprobs is not None, "a loss with KL needs ref_logprobs: see Algorithm.needs"
            divergence = kl_per_token(x.logprobs, x.ref_logprobs, self.kl_estimator)
            terms = terms + self.kl * divergence
            tally.sum("loss/kl", self.kl * x.weights * divergence)
        if self.entropy:
            terms = terms - self.entropy * x.entropy
            tally.sum("loss/entropy", -self.entropy * x.weights * x.entropy)
        loss = (x.weights * terms).sum()
        return loss, tally.sum("loss", loss)

    @torch.no_grad()
    def _tally(self, x: LossInputs, old: Tensor, ratio: Tensor) -> Tally:
        """Means are over tokens in the loss, each counting once, whatever the aggregation."""
        tally = Tally().sum("tokens", float(x.weights.numel()))
        tally.mean("ratio/mean", ratio).minimum("ratio/min", ratio).maximum("ratio/max", ratio)
        # where the minimum takes the clipped side, the token has no gradient
        tally.mean("clip/low", ((ratio < 1.0 - self.clip_low) & (x.advantages < 0)).double())
        tally.mean("clip/high", ((ratio > 1.0 + self.clip_high) & (x.advantages > 0)).double())
        tally.mean("kl/old", kl_per_token(old, x.logprobs, "k3"))
        tally.mean("entropy", x.entropy)
        tally.mean("advantage/abs", x.advantages.abs())
        # against the learner's logprobs at rollout time: later updates do not change the sampler's error
        gap = (old - x.sampler_logprobs).abs()
        tally.mean("sampler_gap/mean", gap).maximum("sampler_gap/max", gap)
        if x.ref_logprobs is not None:
            tally.mean("kl/ref", kl_per_token(x.logprobs, x.ref_logprobs, self.kl_estimator))
        return tally
