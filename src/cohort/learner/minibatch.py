"""The passage of one minibatch through a backend: its loss on flat vectors, and the log-probabilities per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from cohort.algos.aggregate import Totals
from cohort.algos.algorithm import Loss
from cohort.algos.inputs import LossInputs
from cohort.algos.tally import Tally
from cohort.data.batch import Batch, Floats, Microbatch, Minibatch
from cohort.data.pack import pack_minibatch, with_old_logprobs
from cohort.learner.base import TokenLogprobs
from cohort.learner.head import GradientFunction
from cohort.types import Group, Prompt, Provenance, Sample
from cohort.world import World


def make_bare_group(tokens: list[int]) -> Group:
    """Returns a sequence of tokens of no task as a group: its first token is the prompt, the others are one sample."""
    first, *rest = tokens
    prompt = Prompt(task="", id="", visit=0, row={}, messages=[], tokens=[first], provenance=[int(Provenance.PROMPT)])
    drawn = [int(Provenance.SAMPLED)] * len(rest)
    # Any reward: a sample without one would count as not scored.
    sample = Sample(tokens=rest, provenance=drawn, sampler_logprobs=[0.0] * len(rest), reward=0.0)
    return Group(prompt=prompt, samples=[sample])


@dataclass(kw_only=True, slots=True)
class MinibatchResult:
    """Results of forward and backward of one minibatch. The gradients are with the optimizer's master weights."""

    tally: Tally = field(default_factory=Tally)
    # In pieces, in the order of computation: (segments, log-probabilities) of targets.
    logprob_pieces: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class TokenLoss:
    """The loss of an algorithm on one microbatch. It knows [N] vectors only; the backend carries its gradient further.

    `weights` [N] are the token weights; `all_in_loss` says that none of them is 0. `totals` are the denominators over
    all ranks. Metrics and log-probabilities are added to `result`.
    """

    def __init__(
        self,
        algo: Loss,
        micro: Microbatch,
        weights: Tensor,
        all_in_loss: bool,
        totals: Totals,
        result: MinibatchResult,
    ) -> None:
        self.algo = algo
        self.micro = micro
        self.weights = weights
        self.all_in_loss = all_in_loss
        self.totals = totals
        self.result = result

    def compute_gradient(self, rows: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the gradients [n] of the loss on the log-probabilities and on the entropies of some targets.

        `rows` says which of the microbatch's N targets these are; `logprobs` and `entropy` are [n]. The second item is
        None if the loss does not depend on the entropy. Metrics and log-probabilities are added to `self.result`, also
        "signal", the sum of the absolute gradients on log-probabilities.
        """
        leaves = [x.detach().requires_grad_() for x in (logprobs, entropy)]
        # The backend may call this while gradients are off.
        with torch.enable_grad():
            loss, metrics = self.algo.loss(self._make_inputs(rows, *leaves))
        self.result.tally.merge(metrics)
        self.result.logprob_pieces.append((self.micro.segments[rows], logprobs))
        d_logprobs, d_entropy = torch.autograd.grad(loss, leaves, allow_unused=True)
        assert d_logprobs is not None, "a loss without log-probabilities trains nothing"
        self.result.tally.add_sum("signal", d_logprobs.abs())
        return d_logprobs, d_entropy

    def measure(self, logprobs: Tensor) -> None:
        """Adds the metrics of the whole microbatch, whose targets have these log-probabilities [N], to `self.result`.

        The entropies count as 0, because they are not known.
        """
        _, metrics = self.algo.loss(self._make_inputs(slice(None), logprobs, torch.zeros_like(logprobs)))
        self.result.tally.merge(metrics)

    def _make_inputs(self, rows: slice, logprobs: Tensor, entropy: Tensor) -> LossInputs:
        """Returns the inputs of the algorithm's loss for the targets `rows`.

        Its vectors of floats are converted to type and device of `logprobs`. `logprobs` and `entropy` already belong to
        these rows and are used as given.
        """
        micro = self.micro
        return LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=None if micro.old_logprobs is None else micro.old_logprobs[rows].to(logprobs),
            ref_logprobs=None if micro.ref_logprobs is None else micro.ref_logprobs[rows].to(logprobs),
            sampler_logprobs=micro.sampler_logprobs[rows].to(logprobs),
            advantages=micro.advantages[rows].to(logprobs),
            weights=self.weights[rows].to(logprobs),
            segments=micro.segments[rows],
            all_in_loss=self.all_in_loss,
            totals=self.totals,
            num_samples=micro.num_samples,
        )


def sum_counts(minibatch: Minibatch, world: World) -> Totals:
    """Returns the denominators of a minibatch, over all ranks. Every rank must call it."""
    c = minibatch.counts
    counts = torch.tensor([c.num_tokens, c.num_samples, c.num_prompts, c.num_first_tokens], dtype=torch.float64)
    num_tokens, num_samples, num_prompts, num_first_tokens = world.sum(counts).tolist()
    return Totals(
        num_tokens=num_tokens, num_samples=num_samples, num_prompts=num_prompts, num_first_tokens=num_first_tokens
    )


def scatter_to_samples(batch: Batch, pieces: Sequence[tuple[Tensor, Tensor]]) -> dict[int, Floats]:
    """Returns one float64 array [T] per sample, by sample number, with values at its targets and 0 at other tokens.

    `pieces` are pairs (sample number of each target, value of each target). All targets of a sample must follow each
    other, in their order, perhaps across pieces. A sample that is in no piece is not in the result.
    """
    by_sample: dict[int, Floats] = {}
    if not pieces:
        return by_sample
    segments, values = (torch.cat(parts).cpu() for parts in zip(*pieces, strict=True))
    exact = values.double().numpy()
    # A sample begins where the segment number changes.
    edges = [0, *(1 + (segments[1:] != segments[:-1]).nonzero().flatten()).tolist(), len(segments)]
    for begin, end in pairwise(edges):
        n = int(segments[begin])
        by_sample[n] = np.zeros(len(batch.tokens[n]))
        by_sample[n][batch.targets[n]] = exact[begin:end]
    return by_sample


def make_token_logprobs(batch: Batch, values: Mapping[int, Floats]) -> TokenLogprobs:
    """Returns log-probabilities [T], given by sample number, as a record that names the samples by their ids.

    The samples are in the order of `values`; other samples of the batch are not in the record.
    """
    return TokenLogprobs(ids=[batch.ids[n] for n in values], logprobs=[row.tolist() for row in values.values()])


def repack(minibatch: Minibatch, budget: int) -> Minibatch:
    """Returns the minibatch cut again, into microbatches of at most `budget` tokens.

    Old log-probabilities in its microbatches are kept. Raises ConfigError for a budget below the longest sample.
    """
    repacked = pack_minibatch(minibatch.batch, minibatch.index, budget, minibatch.share_prompts)
    old = [(m.segments, m.old_logprobs) for m in minibatch.microbatches if m.old_logprobs is not None]
    return with_old_logprobs(repacked, scatter_to_samples(minibatch.batch, old)) if old else repacked


def describe_layout(parts: Sequence[Minibatch], budget: int, sharing: bool) -> str:
    """Returns a sentence about an update: how many tokens it has, and whether and why prompts are shared.

    `parts` are all minibatches of the update, `budget` is the token budget, and `sharing` the setting
    learner.prefix_sharing.
    """
    micro = [m for minibatch in parts for m in minibatch.microbatches]
    num = sum(len(m.tokens) for m in micro)
    prompt_lengths = [s.prompt_length for m in micro for s in m.layout.spans]
    # A prompt is named by its microbatch and its start there: siblings refer to the same one.
    spans = [(i, s) for i, m in enumerate(micro) for s in m.layout.spans]
    prompts = {(i, s.prompt_start): s.prompt_length for i, s in spans if s.prompt_length}
    without_sharing = num + sum(prompt_lengths) - sum(prompts.values())
    cause = "sharing would save little" if sharing else "learner.prefix_sharing is off"
    why = f"each sample with its own prompt ({cause})"
    if prompts:
        why = f"prompts once per group (once per sample would be {without_sharing} tokens)"
    return f"an update takes {num} tokens, at most {budget} at a time: {why}"


def slice_gradients(row_gradients: tuple[Tensor, Tensor | None]) -> GradientFunction:
    """Returns a gradient function that only cuts rows out of gradients that were computed for all rows before.

    `row_gradients` is (gradient on the log-probabilities [N], gradient on the entropies [N] or None if there is none).
    """
    d_logprobs, d_entropy = row_gradients

    def gradient(rows: slice, *_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the gradients of these rows."""
        return d_logprobs[rows], None if d_entropy is None else d_entropy[rows]

    return gradient
