"""Losses on pairs of answers: they make the better answer of a pair more likely than the worse one, as a `Loss`.

A pair is a group of two samples, the better one first. A batch of pairs keeps groups whole (`Batch.whole_groups`), so
both samples of a pair follow each other in one microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.inputs import LossInputs
from cohort.algos.kl import kl_per_token
from cohort.algos.segments import number_segments
from cohort.algos.tally import Tally
from cohort.config.preferences import IPO, ORPO, Hinge, PairLoss, Robust, Sigmoid, SimPO
from cohort.types import Group, Provenance, Sample, SampleId

# Where a probability is nearer to 1 than this, log(1 - p) is computed as if it were not.
_SMALLEST_GAP = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """P pairs of answers. The columns of every [P, 2] are the better and the worse answer."""

    logprobs: Tensor  # [P, 2] sums over tokens, by the policy; requires grad
    reference: Tensor  # [P, 2] the same by the reference policy; 0 where a loss has none
    lengths: Tensor  # [P, 2] tokens

    def compute_scores(self, mean: bool) -> Tensor:
        """Returns what a loss compares [P, 2]: policy minus reference, per answer or, with `mean`, per token."""
        scores = self.logprobs - self.reference
        return scores / self.lengths if mean else scores


def collect_pairs(inputs: LossInputs) -> Pairs:
    """Returns the sums over the tokens of each answer, in pairs."""
    assert inputs.num_samples % 2 == 0, "a pair is not whole: its batch must have `whole_groups`"
    index = number_segments(inputs.segments)  # [T] 0, 1, 2, ...

    def add_up(values: Tensor) -> Tensor:
        sums = values.new_zeros(inputs.num_samples).index_add(0, index, values)
        return sums.view(-1, 2)

    logprobs = add_up(inputs.logprobs)
    reference = torch.zeros_like(logprobs) if inputs.ref_logprobs is None else add_up(inputs.ref_logprobs)
    return Pairs(logprobs=logprobs, reference=reference, lengths=add_up(torch.ones_like(inputs.logprobs)))


def uses_mean(config: PairLoss) -> bool:
    """Returns whether the score of an answer is a mean over its tokens, not a sum."""
    return config.always_mean or bool(getattr(config, "length_normalize", False))


@singledispatch
def compute_terms(config: PairLoss, margins: Tensor) -> Tensor:
    """Returns the loss term of each pair [P]. `margins` [P] are the scores of better minus worse answers.

    ORPO has terms of its own: see `compute_odds_terms`.
    """
    raise AssertionError(f"no loss is registered for {type(config).__name__}")


@compute_terms.register
def _(config: Sigmoid, margins: Tensor) -> Tensor:
    return _smooth(config.beta * margins, config.label_smoothing)


@compute_terms.register
def _(config: SimPO, margins: Tensor) -> Tensor:
    return _smooth(config.beta * margins - config.gamma, config.label_smoothing)


@compute_terms.register
def _(config: Hinge, margins: Tensor) -> Tensor:
    return relu(1.0 - config.beta * margins)


@compute_terms.register
def _(config: IPO, margins: Tensor) -> Tensor:
    return (margins - 0.5 / config.beta) ** 2


@compute_terms.register
def _(config: Robust, margins: Tensor) -> Tensor:
    logits, share = config.beta * margins, config.label_smoothing
    return (share * logsigmoid(-logits) - (1.0 - share) * logsigmoid(logits)) / (1.0 - 2.0 * share)


def _smooth(logits: Tensor, share: float) -> Tensor:
    """Returns the negative log-sigmoid of `logits`, mixed with that of the opposite: the pair is wrong by `share`."""
    return -(1.0 - share) * logsigmoid(logits) - share * logsigmoid(-logits)


def compute_odds_terms(config: ORPO, scores: Tensor) -> Tensor:
    """Returns the loss term of each pair [P]: minus beta times the log-sigmoid of the log odds ratio.

    `scores` [P, 2] are mean log-probabilities, so exp of them is a probability p; its odds are p / (1 - p).
    """
    # An answer that is certain has infinite odds, and no gradient could say anything about it.
    scores = scores.clamp(max=-_SMALLEST_GAP)
    log_odds = scores - torch.log(-torch.expm1(scores))
    return -config.beta * logsigmoid(log_odds[:, 0] - log_odds[:, 1])


class PreferenceLoss:
    """A loss on pairs, as a `Loss`: the mean over pairs of the terms of `config`, and perhaps imitation.

    Imitation (`config.nll`) is the mean negative log-probability over the tokens of all better answers. Metrics of the
    implicit rewards, which are beta times the scores, have names that begin with `rewards`.
    """

    per_token = False
    has_ratio = False
    whole_groups = True

    def __init__(self, config: PairLoss, rewards: str = "reward") -> None:
        self.config = config
        self._rewards = rewards

    def needs(self, groups: Sequence[Group]) -> frozenset[str]:
        """Returns which log-probabilities the learner must add to the pairs: {"ref"}, or none."""
        lacking = any(sample.ref_logprobs is None for group in groups for sample in group.samples)
        return frozenset({"ref"} if self.config.has_reference and lacking else ())

    def weigh_tokens(self, lengths: Lengths, totals: Totals) -> Tensor:
        """Returns the same token weight [N] for every token: one over the number of pairs of all ranks."""
        return torch.full_like(lengths.sample, 1.0 / totals.num_prompts, dtype=torch.float64)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Tally]:
        """Returns the part of the loss that the pairs of a microbatch have (0-d), and their metrics."""
        assert inputs.totals is not None, "a loss on pairs needs the denominators"
        config, pairs = self.config, collect_pairs(inputs)
        scores = pairs.compute_scores(uses_mean(config))  # [P, 2]
        if isinstance(config, ORPO):
            terms = compute_odds_terms(config, scores)
        else:
            terms = compute_terms(config, scores[:, 0] - scores[:, 1])
        tally = self._measure(inputs, pairs, scores.detach())
        loss = terms.sum() / inputs.totals.num_prompts
        tally.add_sum("loss/pairs", loss.detach())
        if config.nll:
            nll = -config.nll * pairs.logprobs[:, 0].sum() / inputs.totals.num_first_tokens
            tally.add_sum("loss/nll", nll.detach())
            loss = loss + nll
        return loss, tally.add_sum("loss", loss.detach())

    def _measure(self, inputs: LossInputs, pairs: Pairs, scores: Tensor) -> Tally:
        """Returns the metrics of a microbatch. `scores` [P, 2] are what the loss compares."""
        rewards = self.config.beta * scores  # [P, 2]
        better, worse = scores.unbind(1)
        tally = Tally().add_sum("tokens", float(inputs.logprobs.numel()))
        for column, name in enumerate(("chosen", "rejected")):
            tally.add_mean(f"{self._rewards}/{name}", rewards[:, column])
            tally.add_mean(f"logprob/{name}", pairs.logprobs[:, column].detach())
            tally.add_mean(f"length/{name}", pairs.lengths[:, column])
        tally.add_mean(f"{self._rewards}/margin", rewards[:, 0] - rewards[:, 1])
        # Ties count half: a policy that is its own reference is right by chance.
        right = (better > worse).double() + 0.5 * (better == worse).double()
        tally.add_mean(f"{self._rewards}/accuracy", right)
        tally.add_mean("nll", -(pairs.logprobs[:, 0] / pairs.lengths[:, 0]).detach())
        if inputs.ref_logprobs is not None:
            tally.add_mean("kl/ref", kl_per_token(inputs.logprobs.detach(), inputs.ref_logprobs, "k3"))
        return tally.add_mean("entropy", inputs.entropy.detach())


def rank_pairs(config: PairLoss, groups: Sequence[Group], logprobs: Mapping[SampleId, Sequence[float]]) -> list[float]:
    """Returns for each pair whether the better answer has the higher score: 1, or 0, or 0.5 if they are equal.

    `logprobs` are those of the policy, per token and 0 where a token is no target, by sample id.
    """
    ranks = []
    for group in groups:
        better, worse = (
            _score_sample(config, sample, logprobs[id]) for id, sample in zip(group.ids(), group.samples, strict=True)
        )
        ranks.append(0.5 if better == worse else float(better > worse))
    return ranks


def _score_sample(config: PairLoss, sample: Sample, logprobs: Sequence[float]) -> float:
    """Returns the score of an answer: what a loss compares."""
    reference = sample.ref_logprobs if config.has_reference and sample.ref_logprobs is not None else []
    total = math.fsum(logprobs) - math.fsum(reference)
    return total / sample.provenance.count(Provenance.TARGET) if uses_mean(config) else total
