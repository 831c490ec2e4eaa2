"""One minibatch on its way through a backend: its loss on flat vectors, and what was seen of every sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from cohort.algos.algorithm import Loss
from cohort.algos.inputs import LossInputs
from cohort.algos.tally import Tally
from cohort.data.batch import Batch, Floats, Microbatch, Minibatch
from cohort.data.pack import pack_minibatch, with_old_logprobs
from cohort.learner.base import Found


@dataclass(kw_only=True, slots=True)
class Result:
    """What a forward and backward of one minibatch gave."""

    tally: Tally = field(default_factory=Tally)
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (segments, log-probabilities), in pieces


class TokenLoss:
    """An algorithm's loss on one microbatch. It never sees the model: its gradient on [N] vectors is carried on."""

    def __init__(self, algo: Loss, micro: Microbatch, weights: Tensor, whole: bool, result: Result) -> None:
        self.algo, self.micro, self.weights = algo, micro, weights  # weights [N]: of the tokens
        self.whole = whole  # no weight is 0
        self.result = result

    def gradient(self, rows: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of the loss on these rows' log-probabilities and entropies; counts what happened."""
        leaves = [x.detach().requires_grad_() for x in (logprobs, entropy)]
        with torch.enable_grad():
            loss, metrics = self.algo.loss(self._inputs(rows, *leaves))
        self.result.tally.merge(metrics)
        self.result.seen.append((self.micro.segments[rows], logprobs))
        d_logprobs, d_entropy = torch.autograd.grad(loss, leaves, allow_unused=True)
        assert d_logprobs is not None, "a loss without log-probabilities trains nothing"
        self.result.tally.sum("signal", d_logprobs.abs())
        return d_logprobs, d_entropy

    def _inputs(self, rows: slice, logprobs: Tensor, entropy: Tensor) -> LossInputs:
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
            whole=self.whole,
        )


def by_sample(batch: Batch, seen: Sequence[tuple[Tensor, Tensor]]) -> dict[int, Floats]:
    """(segments, values) of targets -> [T] of every sample, by its number; 0 where a token is no target."""
    found: dict[int, Floats] = {}
    if not seen:
        return found
    segments, values = (torch.cat(parts).cpu() for parts in zip(*seen, strict=True))
    exact = values.double().numpy()
    edges = [0, *(1 + (segments[1:] != segments[:-1]).nonzero().flatten()).tolist(), len(segments)]
    for begin, end in pairwise(edges):
        n = int(segments[begin])
        found[n] = np.zeros(len(batch.tokens[n]))
        found[n][batch.targets[n]] = exact[begin:end]
    return found


def found_of(batch: Batch, values: Mapping[int, Floats]) -> Found:
    return Found(ids=[batch.ids[n] for n in values], logprobs=[row.tolist() for row in values.values()])


def packed_again(minibatch: Minibatch, budget: int) -> Minibatch:
    """In microbatches of another budget, with the old log-probabilities that it has."""
    again = pack_minibatch(minibatch.batch, minibatch.index, budget, minibatch.share)
    old = [(m.segments, m.old_logprobs) for m in minibatch.microbatches if m.old_logprobs is not None]
    return with_old_logprobs(again, by_sample(minibatch.batch, old)) if old else again
