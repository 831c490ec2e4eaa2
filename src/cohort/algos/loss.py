"""The loss of a step, as a sum over weighted tokens: policy term, sampler correction, KL, entropy; and its metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.algos.correction import bound_ratios, importance_ratios
from cohort.algos.inputs import LossInputs
from cohort.algos.kl import kl_per_token
from cohort.algos.surrogates import RegisteredSurrogate, Surrogate, Tokens
from cohort.algos.tally import Tally
from cohort.config.algos import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Loss of a policy-gradient algorithm. Each sampled token adds its token weight times w S + k K - e H.

    w is the bounded importance ratio, S the surrogate of `config`'s algorithm, K the KL estimate, H the entropy; k and
    e are the coefficients below.
    """

    surrogate: RegisteredSurrogate
    config: Policy
    # The coefficients of this step. They differ from those of the config where they are adjusted to a target.
    kl_coefficient: float
    entropy_coefficient: float

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        """Returns the weighted sum over tokens (0-d) and the metrics. The denominators are in `inputs.weights`."""
        x, kl = inputs.in_loss(), self.config.kl
        # Without old log-probabilities the weights have not moved: the ratio is exactly 1, but has a gradient.
        old = x.logprobs.detach() if x.old_logprobs is None else x.old_logprobs  # [T]
        tokens = Tokens(logprobs=x.logprobs, old_logprobs=old, advantages=x.advantages, segments=x.segments)
        surrogate = self.surrogate.function(tokens, self.config)
        terms = surrogate.terms
        tally = self._measure(x, old, surrogate)
        # Measured even where nothing is corrected: the metrics then show what a correction would have to undo.
        factor = self._compute_importance_factor(x, old, tally)
        if self.config.correction.kind != "none":
            terms = terms * factor
        tally.add_sum("loss/policy", x.weights * terms)
        if self.kl_coefficient and kl.place == "loss":
            other = x.sampler_logprobs if kl.to == "sampler" else x.ref_logprobs
            assert other is not None, "a loss with KL needs ref_logprobs: see Algorithm.needs"
            divergence = kl_per_token(x.logprobs, other, kl.estimator)
            terms = terms + self.kl_coefficient * divergence
            tally.add_sum("loss/kl", self.kl_coefficient * x.weights * divergence)
        if self.entropy_coefficient:
            terms = terms - self.entropy_coefficient * x.entropy
            tally.add_sum("loss/entropy", -self.entropy_coefficient * x.weights * x.entropy)
        loss = (x.weights * terms).sum()
        return loss, tally.add_sum("loss", loss)

    def _compute_importance_factor(self, x: LossInputs, old: Tensor, tally: Tally) -> Tensor:
        """Returns the importance ratios p_old / p_sampler [T], limited as the config says, and adds metrics to `tally`.

        `old` [T] are the log-probabilities at the start of the step. The ratios have no gradient.
        """
        raw = importance_ratios(old, x.sampler_logprobs, x.segments, self.config.correction.level)  # [T]
        factor = bound_ratios(raw, self.config.correction)
        tally.add_mean("importance/mean", factor).add_mean("importance/square", factor.square())
        tally.add_minimum("importance/min", raw).add_maximum("importance/max", raw)
        tally.add_mean("importance/bounded", (factor != raw).double())
        return factor

    @torch.no_grad()
    def _measure(self, x: LossInputs, old: Tensor, surrogate: Surrogate) -> Tally:
        """Returns the metrics of the tokens in the loss. In means each token counts once, whatever its token weight.

        `old` [T] are the log-probabilities at the start of the step. `surrogate` has the ratios and the clipped tokens.
        """
        tally = Tally().add_sum("tokens", float(x.weights.numel()))
        ratio = surrogate.ratio
        tally.add_mean("ratio/mean", ratio).add_minimum("ratio/min", ratio).add_maximum("ratio/max", ratio)
        for name, is_clipped in (("clip/low", surrogate.low), ("clip/high", surrogate.high)):
            if is_clipped is not None:
                tally.add_mean(name, is_clipped.double())
        tally.add_mean("entropy", x.entropy)
        tally.add_mean("advantage/mean", x.advantages).add_mean("advantage/abs", x.advantages.abs())
        measure_policies(x, old, tally)
        if x.ref_logprobs is not None:
            tally.add_mean("kl/ref", kl_per_token(x.logprobs, x.ref_logprobs, self.config.kl.estimator))
        return tally


@torch.no_grad()
def measure_policies(x: LossInputs, old: Tensor, tally: Tally) -> None:
    """Adds to `tally` how far the policy is from the one at the start of the step and from the sampler.

    Also the smallest and largest entropy. `old` [T] are the log-probabilities at the start of the step.
    """
    # KL(old || current) and KL(sampler || current): estimates need tokens that the first policy drew.
    tally.add_mean("kl/old", kl_per_token(old, x.logprobs, "k3"))
    tally.add_mean("kl/sampler", kl_per_token(x.sampler_logprobs, x.logprobs, "k3"))
    tally.add_minimum("entropy/min", x.entropy).add_maximum("entropy/max", x.entropy)
    # The gap is to the learner's logprobs at the step's start: later updates do not change the sampler's error.
    gap = (old - x.sampler_logprobs).abs()
    tally.add_mean("sampler_gap/mean", gap).add_maximum("sampler_gap/max", gap)
