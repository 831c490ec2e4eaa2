"""Effect of a step's loss on every token: dL/dlogprob of its first update, computed from the rollouts alone.

A loss sees no model, only log-probabilities, and those are stored. They become leaves of the graph, the algorithm's own
loss is evaluated on them, and its gradient with respect to them is the effect.
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
from cohort.data.batch import Batch, Microbatch
from cohort.data.pack import longest_sample, make_batch, pack
from cohort.types import Group, Provenance, Sample

# Reasons why a token in the loss has no gradient.
CLIPPED = "clipped"
CORRECTED = "sampler correction"
NO_ADVANTAGE = "advantage is 0"
NOT_FINITE = "not finite"
OTHER = "the loss is flat here"
_BUDGET = 65536  # tokens per microbatch; no model runs, so memory does not limit it

LogprobFunction = Callable[[Sample], list[float]]
"""Returns the log-probability of each token of a sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleEffect:
    """Effect of the loss on one sample. The lists have one entry per token of the sample."""

    gradient: list[float]  # dL/dlogprob: below 0, the update makes the token more likely; 0.0 if not in the loss
    zero_reasons: list[str]  # why a token in the loss has no gradient; "" = it has one, or it is not in the loss
    metrics: dict[str, float] = field(default_factory=dict)  # of the loss on this sample; empty = not in the loss

    @property
    def is_in_loss(self) -> bool:
        """Whether any token of the sample is in the loss."""
        return bool(self.metrics)

    @property
    def signal(self) -> float:
        """Sum of |dL/dlogprob| over the tokens of the sample: how strongly the update pushes them."""
        return math.fsum(map(abs, self.gradient))


@dataclass(frozen=True, kw_only=True)
class StepEffect:
    """Effect of the loss on all samples of a step, group by group."""

    groups: list[list[SampleEffect]]
    has_exact_ratios: bool  # the learner's log-probabilities are stored; without them every ratio is taken to be 1
    is_known: bool = True  # False = the loss is foreign code, which was not run: all gradients are 0 here

    @cached_property
    def group_signals(self) -> list[float]:
        """Sum of |dL/dlogprob| over the tokens of each group, in the order of `groups`."""
        return [math.fsum(sample.signal for sample in group) for group in self.groups]

    @cached_property
    def signal(self) -> float:
        """Sum of |dL/dlogprob| over all tokens of the step."""
        return math.fsum(self.group_signals)

    def compute_share(self, signal: float) -> float | None:
        """Returns `signal`, that of a part of the step, divided by that of the whole step; 0 if the step has none.

        None if the effect is not known.
        """
        if not self.is_known:
            return None
        return signal / self.signal if self.signal else 0.0


def compute_step_effect(
    groups: Sequence[Group], algo: Loss, minibatches: int = 1, policy: LogprobFunction | None = None
) -> StepEffect:
    """Returns dL/dlogprob of every token of a step, by its first update. The groups must have their advantages.

    `minibatches` is the number of minibatches that the update divides the groups into. Current log-probabilities are
    those that `policy` returns for a sample or, if it is None, the learner's stored ones. If a trained sample lacks
    these, all samples use the sampler's, with ratios of 1. Tokens outside the loss have 0. The groups are not changed.
    """
    samples = [s for g in groups for s in g.samples]
    exact = all(s.old_logprobs is not None for g in groups if not g.excluded for s in g.samples if _is_trained(s))
    # A batch has old log-probabilities of all samples or of none.
    if not exact:
        samples = [replace(s, old_logprobs=None) for s in samples]
    effects = {place: _make_zero_effect(s) for place, s in enumerate(samples)}
    rows = iter(samples)
    same = [replace(g, samples=[next(rows) for _ in g.samples]) for g in groups]
    batch = make_batch(same, minibatches, whole_groups=algo.whole_groups)
    # The batch numbers the samples that it packed; `effects` has all samples of the groups.
    places = {id: place for place, id in enumerate(id for g in same for id in g.ids())}
    for minibatch in pack(batch, max(longest_sample(batch), _BUDGET), share=False):
        counts = minibatch.counts
        totals = Totals(
            num_tokens=counts.num_tokens,
            num_samples=counts.num_samples,
            num_prompts=counts.num_prompts,
            num_first_tokens=counts.num_first_tokens,
        )
        for micro in minibatch.microbatches:
            weights = algo.weigh_tokens(Lengths(sample=micro.lengths, group=micro.group_lengths), totals)
            for numbers, span in _list_units(micro, batch):
                at = [places[batch.ids[n]] for n in numbers]
                inputs = replace(_make_loss_inputs(micro, weights, span), totals=totals, num_samples=len(numbers))
                found = _compute_effects([samples[place] for place in at], inputs, algo, policy)
                effects |= dict(zip(at, found, strict=True))
    ordered = iter(effects.values())
    return StepEffect(groups=[[next(ordered) for _ in g.samples] for g in groups], has_exact_ratios=exact)


def make_unknown_effect(groups: Sequence[Group]) -> StepEffect:
    """Returns the effect of a loss that is not run. It tells only which samples are in the loss."""
    effects = []
    for group in groups:
        zeros = [_make_zero_effect(s) for s in group.samples]
        effects.append(
            [
                replace(zero, metrics={"tokens": float(s.num_sampled)} if _is_trained(s) and not group.excluded else {})
                for zero, s in zip(zeros, group.samples, strict=True)
            ]
        )
    return StepEffect(groups=effects, has_exact_ratios=False, is_known=False)


def _is_trained(sample: Sample) -> bool:
    """Returns whether the sample itself can be in the loss: not failed, not masked, with a sampled token.

    Its group may be excluded nevertheless.
    """
    return not sample.failure and not sample.masked and sample.num_sampled > 0


def _make_zero_effect(sample: Sample) -> SampleEffect:
    """Returns the effect on a sample that is not in the loss: gradients of 0 without reasons."""
    return SampleEffect(gradient=[0.0] * len(sample.tokens), zero_reasons=[""] * len(sample.tokens))


def _list_units(micro: Microbatch, batch: Batch) -> list[tuple[list[int], slice]]:
    """Returns what one call of a loss must see: (numbers of samples, places of their tokens in the microbatch).

    It is a whole sample, because in a sequence-level loss its tokens depend on each other; or a whole group, if the
    loss compares samples.
    """
    values, counts = torch.unique_consecutive(micro.segments, return_counts=True)
    units: list[tuple[list[int], slice]] = []
    begin = 0
    for number, num in zip(values.tolist(), counts.tolist(), strict=True):
        end = begin + num
        if batch.whole_groups and units and batch.group[units[-1][0][0]] == batch.group[number]:
            numbers, span = units[-1]
            units[-1] = ([*numbers, number], slice(span.start, end))
        else:
            units.append(([number], slice(begin, end)))
        begin = end
    return units


def _make_loss_inputs(micro: Microbatch, weights: Tensor, span: slice) -> LossInputs:
    """Returns the inputs of the loss for the tokens at the positions `span` of a microbatch, in float64.

    `weights` are the token weights of the microbatch. The current log-probabilities are the old ones of the learner, or
    the sampler's if it has none. The entropy, which is not stored, is 0; all else is as in an update.
    """
    old, ref = micro.old_logprobs, micro.ref_logprobs
    sampler = micro.sampler_logprobs[span].double()
    current = sampler if old is None else old[span].double()
    return LossInputs(
        logprobs=current,
        # The entropy is not stored. Its gradient is not one of a token's log-probability, so zeros change nothing here.
        entropy=torch.zeros_like(current),
        old_logprobs=None if old is None else current,
        ref_logprobs=None if ref is None else ref[span].double(),
        sampler_logprobs=sampler,
        advantages=micro.advantages[span].double(),
        weights=weights[span].double(),
        segments=micro.segments[span],
    )


def _compute_effects(
    samples: Sequence[Sample], inputs: LossInputs, algo: Loss, policy: LogprobFunction | None
) -> list[SampleEffect]:
    """Returns the effects on samples that one call of the loss sees. `inputs` has one row per sampled token of each.

    If `policy` is given, its log-probabilities of the samples replace those in `inputs`. A gradient that is not finite
    becomes 0, with that reason.
    """
    places = [(n, i) for n, s in enumerate(samples) for i, p in enumerate(s.provenance) if p == Provenance.SAMPLED]
    if policy is not None:
        values = [policy(sample) for sample in samples]
        inputs = replace(inputs, logprobs=torch.tensor([values[n][i] for n, i in places], dtype=torch.float64))
    gradient, metrics = _differentiate_loss(inputs, algo)
    effects = [replace(_make_zero_effect(sample), metrics=metrics) for sample in samples]
    reasons = _explain_zero_gradients(inputs, gradient, algo)
    for (n, i), value, reason in zip(places, gradient.tolist(), reasons, strict=True):
        effects[n].gradient[i] = 0.0 if reason == NOT_FINITE else value
        effects[n].zero_reasons[i] = reason
    return effects


def _differentiate_loss(inputs: LossInputs, algo: Loss) -> tuple[Tensor, dict[str, float]]:
    """Returns dL/dlogprob of each token in `inputs`, and the metrics of the loss by name."""
    leaf = inputs.logprobs.clone().requires_grad_()
    loss, tally = algo.loss(replace(inputs, logprobs=leaf, entropy=inputs.entropy.clone().requires_grad_()))
    (gradient,) = torch.autograd.grad(loss, [leaf])
    return gradient, tally.to_metrics()


def _explain_zero_gradients(inputs: LossInputs, gradient: Tensor, algo: Loss) -> list[str]:
    """Returns for each token why it has no gradient, such as "clipped", or no finite one; "" if it has one.

    Tokens with a token weight of 0 get "" too. Finds the reason by evaluating the loss again with one cause removed,
    which is right for any algorithm.
    """
    reasons = [""] * len(gradient)
    for i in (~gradient.isfinite()).nonzero().flatten().tolist():
        reasons[i] = NOT_FINITE
    silent = (gradient == 0) & (inputs.weights != 0)
    if not silent.any():
        return reasons
    # Without clipping: all ratios are 1. Without correction: the sampler agrees with the learner.
    on_policy = replace(inputs, old_logprobs=inputs.logprobs)
    trusted = replace(inputs, sampler_logprobs=inputs.logprobs if inputs.old_logprobs is None else inputs.old_logprobs)
    is_clipped, is_corrected = (_differentiate_loss(x, algo)[0] != 0 for x in (on_policy, trusted))
    for i in silent.nonzero().flatten().tolist():
        if inputs.advantages[i] == 0:
            reasons[i] = NO_ADVANTAGE
        elif is_clipped[i] and not is_corrected[i]:
            reasons[i] = CLIPPED
        else:
            reasons[i] = CORRECTED if is_corrected[i] else OTHER
    return reasons
