"""The loss of a step as a sum over weighted tokens: policy term, sampler correction, KL, entropy; and its metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.algos.correction import corrected, importance
from cohort.algos.inputs import LossInputs
from cohort.algos.kl import kl_per_token
from cohort.algos.surrogates import Registered, Surrogate, Tokens
from cohort.algos.tally import Tally
from cohort.config.algos import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Per sampled token: w S + kl K - entropy H, with the surrogate S of `config`'s algorithm."""

    surrogate: Registered
    config: Policy
    kl: float  # weights in force, which may differ from the config's where they are steered
    entropy: float

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        """The weighted sum, and what happened. The denominators are in `inputs.weights`."""
        x, kl = inputs.in_loss(), self.config.kl
        old = x.logprobs.detach() if x.old_logprobs is None else x.old_logprobs  # [T]
        tokens = Tokens(logprobs=x.logprobs, old_logprobs=old, advantages=x.advantages, segments=x.segments)
        found = self.surrogate.form(tokens, self.config)
        terms, tally = found.terms, self._tally(x, old, found)
        weight = self._importance(x, old, tally)
        if self.config.correction.kind != "none":
            terms = terms * weight
        tally.sum("loss/policy", x.weights * terms)
        if self.kl and kl.place == "loss":
            other = x.sampler_logprobs if kl.to == "sampler" else x.ref_logprobs
            assert other is not None, "a loss with KL needs ref_logprobs: see Algorithm.needs"
            divergence = kl_per_token(x.logprobs, other, kl.estimator)
            terms = terms + self.kl * divergence
            tally.sum("loss/kl", self.kl * x.weights * divergence)
        if self.entropy:
            terms = terms - self.entropy * x.entropy
            tally.sum("loss/entropy", -self.entropy * x.weights * x.entropy)
        loss = (x.weights * terms).sum()
        return loss, tally.sum("loss", loss)

    def _importance(self, x: LossInputs, old: Tensor, tally: Tally) -> Tensor:
        """Measured always, also where nothing is corrected: then it is what a correction would have to undo."""
        raw = importance(old, x.sampler_logprobs, x.segments, self.config.correction.level)  # [T]
        weight = corrected(raw, self.config.correction)
        tally.mean("importance/mean", weight).mean("importance/square", weight.square())
        tally.minimum("importance/min", raw).maximum("importance/max", raw)
        tally.mean("importance/bounded", (weight != raw).double())
        return weight

    @torch.no_grad()
    def _tally(self, x: LossInputs, old: Tensor, found: Surrogate) -> Tally:
        """Means are over tokens in the loss, each counting once, whatever the aggregation."""
        tally = Tally().sum("tokens", float(x.weights.numel()))
        tally.mean("ratio/mean", found.ratio).minimum("ratio/min", found.ratio).maximum("ratio/max", found.ratio)
        for name, held in (("clip/low", found.low), ("clip/high", found.high)):
            if held is not None:
                tally.mean(name, held.double())
        tally.mean("kl/old", kl_per_token(old, x.logprobs, "k3"))
        tally.mean("kl/sampler", kl_per_token(x.sampler_logprobs, x.logprobs, "k3"))  # of tokens that the sampler drew
        tally.mean("entropy", x.entropy).minimum("entropy/min", x.entropy).maximum("entropy/max", x.entropy)
        tally.mean("advantage/mean", x.advantages).mean("advantage/abs", x.advantages.abs())
        # against the learner's logprobs at the step's start: later updates do not change the sampler's error
        gap = (old - x.sampler_logprobs).abs()
        tally.mean("sampler_gap/mean", gap).maximum("sampler_gap/max", gap)
        if x.ref_logprobs is not None:
            tally.mean("kl/ref", kl_per_token(x.logprobs, x.ref_logprobs, self.config.kl.estimator))
        return tally
