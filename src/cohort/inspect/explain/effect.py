"""What a step's loss did to every token: dL/dlogprob of its first update, from the rollouts alone.

A loss sees no model, only log-probabilities, and those are stored: they become leaves, the algorithm's own loss
is asked, and its gradient on them is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.algorithm import Loss
from cohort.algos.inputs import LossInputs
from cohort.data.batch import Microbatch
from cohort.data.pack import make_batch, pack
from cohort.types import Group, Provenance, Sample

CLIPPED, CORRECTED, NO_ADVANTAGE = "clipped", "sampler correction", "advantage is 0"
NOT_FINITE, OTHER = "not finite", "the loss is flat here"
_BUDGET = 65536  # tokens a pack: nothing but bookkeeping is done with them

Policy = Callable[[Sample], list[float]]
"""Log-probabilities of a sample's tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleEffect:
    """One number a token of the sample; 0.0 where the loss does not look."""

    gradient: list[float]  # dL/dlogprob: below 0, the update pushes the token up
    idle: list[str]  # why a token that is in the loss has no gradient; "" = it has one, or is not in the loss
    metrics: dict[str, float] = field(default_factory=dict)  # the loss's own, of this sample; none = not in the loss

    @property
    def in_loss(self) -> bool:
        return bool(self.metrics)

    @property
    def size(self) -> float:
        return math.fsum(map(abs, self.gradient))


@dataclass(frozen=True, kw_only=True)
class StepEffect:
    """The effects of a step, group by group."""

    groups: list[list[SampleEffect]]
    exact: bool  # the learner's log-probabilities are stored; without them every ratio is taken to be 1

    @cached_property
    def sizes(self) -> list[float]:
        """Sum of |dL/dlogprob| of each group."""
        return [math.fsum(sample.size for sample in group) for group in self.groups]

    @cached_property
    def total(self) -> float:
        return math.fsum(self.sizes)

    def share(self, size: float) -> float:
        """Of the step's total; 0 where there is none."""
        return size / self.total if self.total else 0.0


def step_effect(groups: Sequence[Group], algo: Loss, minibatches: int = 1, policy: Policy | None = None) -> StepEffect:
    """The effect of a step on graded groups, by the policy it began with or, if given, by `policy`."""
    samples = [s for g in groups for s in g.samples]
    exact = all(s.old_logprobs is not None for g in groups if not g.excluded for s in g.samples if _trains(s))
    if not exact:
        samples = [replace(s, old_logprobs=None) for s in samples]
    effects = [_none(s) for s in samples]
    rows = iter(samples)
    same = [replace(g, samples=[next(rows) for _ in g.samples]) for g in groups]
    longest = max((len(g.prompt.tokens) + len(s.tokens) for g in same for s in g.samples), default=0)
    batch = make_batch(same, minibatches)
    places = {id: place for place, id in enumerate(id for g in same for id in g.ids())}
    for minibatch in pack(batch, max(longest, _BUDGET), share=False):
        counts = minibatch.counts
        totals = Totals(num_tokens=counts.num_tokens, num_samples=counts.num_samples, num_prompts=counts.num_prompts)
        for micro in minibatch.microbatches:
            weights = algo.weigh(Lengths(sample=micro.lengths, group=micro.group_lengths), totals)
            begin = 0
            # a whole sample a call: the tokens of a sequence-level loss depend on each other
            for segment, num in zip(*_runs(micro.segments), strict=True):
                at = slice(begin, begin + num)
                place = places[batch.ids[segment]]
                effects[place] = _effect(samples[place], _inputs(micro, weights, at), algo, policy)
                begin += num
    found = iter(effects)
    return StepEffect(groups=[[next(found) for _ in g.samples] for g in groups], exact=exact)


def _trains(sample: Sample) -> bool:
    return not sample.failure and not sample.masked and sample.num_sampled > 0


def _none(sample: Sample) -> SampleEffect:
    return SampleEffect(gradient=[0.0] * len(sample.tokens), idle=[""] * len(sample.tokens))


def _runs(segments: Tensor) -> tuple[list[int], list[int]]:
    values, counts = torch.unique_consecutive(segments, return_counts=True)
    return values.tolist(), counts.tolist()


def _inputs(micro: Microbatch, weights: Tensor, at: slice) -> LossInputs:
    """As the learner makes them, in float64, with the stored log-probabilities as the current ones."""
    old, ref = micro.old_logprobs, micro.ref_logprobs
    sampler = micro.sampler_logprobs[at].double()
    current = sampler if old is None else old[at].double()
    return LossInputs(
        logprobs=current,
        entropy=torch.zeros_like(current),  # its gradient is not of a token's log-probability
        old_logprobs=None if old is None else current,
        ref_logprobs=None if ref is None else ref[at].double(),
        sampler_logprobs=sampler,
        advantages=micro.advantages[at].double(),
        weights=weights[at].double(),
        segments=micro.segments[at],
    )


def _effect(sample: Sample, inputs: LossInputs, algo: Loss, policy: Policy | None) -> SampleEffect:
    where = [i for i, p in enumerate(sample.provenance) if p == Provenance.SAMPLED]
    if policy is not None:
        values = policy(sample)
        inputs = replace(inputs, logprobs=torch.tensor([values[i] for i in where], dtype=torch.float64))
    gradient, metrics = _gradient(inputs, algo)
    effect = _none(sample)
    reasons = _reasons(inputs, gradient, algo)
    for i, value, reason in zip(where, gradient.tolist(), reasons, strict=True):
        effect.gradient[i], effect.idle[i] = 0.0 if reason == NOT_FINITE else value, reason
    return replace(effect, metrics=metrics)


def _gradient(inputs: LossInputs, algo: Loss) -> tuple[Tensor, dict[str, float]]:
    leaf = inputs.logprobs.clone().requires_grad_()
    loss, tally = algo.loss(replace(inputs, logprobs=leaf, entropy=inputs.entropy.clone().requires_grad_()))
    (gradient,) = torch.autograd.grad(loss, [leaf])
    return gradient, tally.to_metrics()


def _reasons(inputs: LossInputs, gradient: Tensor, algo: Loss) -> list[str]:
    """Why tokens have no gradient, found by asking the loss again without each cause: right for any algorithm."""
    reasons = [""] * len(gradient)
    for i in (~gradient.isfinite()).nonzero().flatten().tolist():
        reasons[i] = NOT_FINITE
    silent = (gradient == 0) & (inputs.weights != 0)
    if not silent.any():
        return reasons
    on_policy = replace(inputs, old_logprobs=inputs.logprobs)
    trusted = replace(inputs, sampler_logprobs=inputs.logprobs if inputs.old_logprobs is None else inputs.old_logprobs)
    clipped, corrected = (_gradient(x, algo)[0] != 0 for x in (on_policy, trusted))
    for i in silent.nonzero().flatten().tolist():
        if inputs.advantages[i] == 0:
            reasons[i] = NO_ADVANTAGE
        elif clipped[i] and not corrected[i]:
            reasons[i] = CLIPPED
        else:
            reasons[i] = CORRECTED if corrected[i] else OTHER
    return reasons
