"""The learner in one process (or one of several data-parallel ones: see `World`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.algorithm import Loss
from cohort.algos.inputs import LossInputs
from cohort.algos.tally import Tally
from cohort.clock import stage
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.data.batch import Batch, Microbatch, Minibatch
from cohort.data.pack import pack
from cohort.data.transfer import put
from cohort.errors import TrainingStopped
from cohort.learner.attention import packed_attention
from cohort.learner.base import LiveWeights
from cohort.learner.head import gradient_through_head, token_logprobs
from cohort.learner.optim import Optimizer, global_norm, learning_rate
from cohort.learner.plan import Plan
from cohort.learner.world import World
from cohort.models.auto import AnyDecoder, AutoDecoder
from cohort.models.lora import Adapters
from cohort.types import Group, Provenance, Sample

log = logging.getLogger(__name__)

CPU_BUDGET = 2048  # tokens a microbatch where none are asked for and nothing is planned
MAX_BAD = 5  # updates in a row with non-finite gradients, each skipped and counted, before the run stops
REFERENCE = "reference/"  # what a reference that moves is called there
ADAPTER = "adapter/"  # what adapters are called in the learner's state, before their names


class LocalLearner:
    """Trains `decoder` in place, or its adapters. `reference` is the frozen policy of the KL term, if there is one:
    adapters need none, the decoder without them is it.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        config: LearnerConfig,
        optim: OptimConfig,
        *,
        num_updates: int,
        temperature: float = 1.0,
        reference: AnyDecoder | None = None,
        world: World | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.decoder, self.config, self.optim = decoder, config, optim
        self.temperature, self.reference, self.world = temperature, reference, world or World()
        self.num_updates = num_updates
        self.refresh_every = 0  # steps; 0 = the reference stays
        self.token_budget = config.token_budget or CPU_BUDGET
        self.least_budget = 0  # below which a permitted sample would not fit
        self._fitting = 0  # tokens a microbatch that memory was found to hold; 0 = it never ran out
        self.plan: Plan | None = None
        self._told = False
        self.adapters = adapters
        self.optimizer = Optimizer(decoder if adapters is None else adapters, optim)
        self.update_index = 0  # updates attempted: the schedule's clock, advanced also by those without signal
        self.num_bad = 0  # consecutive updates with non-finite gradients
        self._seen: list[tuple[Tensor, Tensor]] = []  # (segments, log-probabilities) of the last minibatch
        self._annotated = -1  # update_index at which old log-probabilities were last annotated

    def follow(self, plan: Plan | None) -> None:
        """Use a GPU's memory as planned; the first update tells how wrong the plan was."""
        self.plan = plan
        if plan is not None:
            self.token_budget, self.decoder.recompute = plan.token_budget, plan.recompute

    # ---- the step --------------------------------------------------------------------------------------------

    @stage("annotate")
    def annotate(self, groups: Sequence[Group], needs: Collection[str]) -> None:
        if "old" in needs:
            self._annotated = self.update_index
            for sample, values in self._sample_logprobs(groups, self.decoder):
                sample.old_logprobs = values
        if "ref" in needs:
            with self._reference_policy() as reference:
                for sample, values in self._sample_logprobs(groups, reference):
                    sample.ref_logprobs = values

    @stage("update")
    def update(self, batch: Batch, algo: Loss) -> dict[str, float]:
        tally = Tally()
        self._tell_layout(batch)
        first, *later = batch.minibatches
        if algo.has_ratio:
            later = [self._with_old(batch, minibatch) for minibatch in later]
        for epoch in range(self.config.epochs):
            for minibatch in (first, *later):
                with self._compared_with_plan(minibatch):
                    tally.merge(self.forward_backward(minibatch, algo))
                if epoch == 0 and minibatch is first:
                    self._note_logprobs(batch, self._seen)
                for name, value in self.optim_step().items():
                    exact = torch.tensor(value, dtype=torch.float64)
                    tally.sum(name, exact) if name.startswith("updates/") else tally.mean(name, exact)
            if algo.has_ratio and epoch == 0 and self.config.epochs > 1:
                first = _packed_again(first)  # with what its first update saw
        self._refresh_reference()
        return tally.to_metrics()

    def _refresh_reference(self) -> None:
        """After every `refresh_every` steps the reference becomes the current policy."""
        every = self.refresh_every * self.config.epochs * self.config.minibatches  # updates
        if self.reference is not None and every and self.update_index % every == 0:
            self.reference.load_state_dict(self.decoder.state_dict())

    @torch.no_grad()
    def _with_old(self, batch: Batch, minibatch: Minibatch) -> Minibatch:
        """With the log-probabilities of before the first update: its own update finds other weights."""
        if all(m.old_logprobs is not None for m in minibatch.microbatches):
            return minibatch
        self._note_logprobs(batch, [(m.segments, self._logprobs(self.decoder, m)) for m in minibatch.microbatches])
        return _packed_again(minibatch)

    def _note_logprobs(self, batch: Batch, seen: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Samples without `old_logprobs` get these: their ratios are to them, and `cohort explain` shows them."""
        if not seen or all(s.old_logprobs is not None for s in batch.samples):
            return
        segments, logprobs = (torch.cat(parts).cpu() for parts in zip(*seen, strict=True))
        for segment, row in _rows(segments, logprobs):
            sample = batch.samples[segment]
            if sample.old_logprobs is None and sample.num_sampled:  # not targets, given to be imitated
                sample.old_logprobs = _spread(row, sample)

    def forward_backward(self, minibatch: Minibatch, algo: Loss) -> Tally:
        """Where memory runs out, once more from the start in smaller microbatches: the result is the same."""
        # what ranks do together happens once, however often one of them starts again
        counts = [minibatch.num_tokens, minibatch.num_samples, minibatch.num_prompts]
        num_tokens, num_samples, num_prompts = self.world.sum(torch.tensor(counts, dtype=torch.float64)).tolist()
        totals = Totals(num_tokens=num_tokens, num_samples=num_samples, num_prompts=num_prompts)
        tally = self._accumulated(minibatch, totals, algo)
        self._sum_grads()
        return tally

    def _accumulated(self, minibatch: Minibatch, totals: Totals, algo: Loss) -> Tally:
        """The gradients of all microbatches."""
        if self._fitting and _largest(minibatch) > self._fitting:  # it ran out before, in another epoch
            minibatch = replace(minibatch, microbatches=minibatch.repacked(self._fitting))
        while True:
            try:
                return self._attempt(minibatch, totals, algo)
            except torch.OutOfMemoryError as error:
                reason = str(error).splitlines()[0]
            # outside the handler, whose exception holds every tensor of the attempt
            minibatch = self._in_smaller_parts(minibatch, reason)

    def _in_smaller_parts(self, minibatch: Minibatch, reason: str) -> Minibatch:
        largest = _largest(minibatch)
        budget = max(minibatch.longest, largest // 2)
        if budget >= largest:
            raise TrainingStopped(
                f"out of memory with a single sample of {minibatch.longest} tokens in a microbatch: {reason} "
                "Lower sampling.max_tokens, or use a smaller model."
            )
        self.optimizer.zero_grad()
        if self.decoder.embed.is_cuda:
            torch.cuda.empty_cache()
        self._fitting = budget
        self.token_budget = min(self.token_budget, max(budget, self.least_budget))
        log.warning("out of memory: the update starts again with %d instead of %d tokens a microbatch", budget, largest)
        return replace(minibatch, microbatches=minibatch.repacked(budget))

    def _tell_layout(self, batch: Batch) -> None:
        """Once, in the log: how this run's batches are laid out, and why."""
        if self._told or not any(m.microbatches for m in batch.minibatches):
            return
        self._told = True
        micro = [m for minibatch in batch.minibatches for m in minibatch.microbatches]
        num, sizes = sum(len(m.tokens) for m in micro), [s.size for m in micro for s in m.layout.spans]
        prompts = {(i, s.prompt): s.size for i, m in enumerate(micro) for s in m.layout.spans if s.size}
        alone = num + sum(sizes) - sum(prompts.values())
        why = "each sample with its own prompt: " + ("little to share" if self.config.prefix_sharing else "as asked")
        if prompts:
            why = f"prompts once a group (once a sample would be {alone} tokens)"
        log.info("an update takes %d tokens, at most %d at a time: %s", num, self.token_budget, why)

    @contextmanager
    def _compared_with_plan(self, minibatch: Minibatch) -> Iterator[None]:
        """Tells, of the first update, what it took besides what was there before."""
        if self.plan is None or not minibatch.microbatches:
            yield
            return
        device, plan, self.plan = self.decoder.embed.device, self.plan, None
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        used = torch.cuda.max_memory_allocated(device) - before
        off = 100 * (plan.update_of(_largest(minibatch)) / used - 1)
        log.info("%s", plan.words)
        text = "the first update took %.1f GiB with %d tokens at a time: the plan is %+.0f%% off"
        log.info(text, used / 2**30, _largest(minibatch), off)

    def _attempt(self, minibatch: Minibatch, totals: Totals, algo: Loss) -> Tally:
        self.optimizer.zero_grad()
        self._seen = []
        # nothing has moved since the annotation: the current log-probabilities are the old ones, to the last bit,
        # which those of another packing (dead groups have left it) are not
        unmoved = self._annotated == self.update_index
        tally = Tally()
        for micro in minibatch.microbatches:
            # on the host, where looking costs nothing
            weights = algo.weigh(Lengths(sample=micro.lengths, group=micro.group_lengths), totals)
            whole, device = bool(weights.all()), self.decoder.embed.device
            micro = micro.to(device)
            if unmoved:
                micro = replace(micro, old_logprobs=None)
            with (self.adapters or self.optimizer).gradients():
                tally.merge(self._backward(micro, put(weights, device), whole, algo))
            self.optimizer.collect_grads()
        return tally

    def _backward(self, micro: Microbatch, weights: Tensor, whole: bool, algo: Loss) -> Tally:
        """Add a microbatch's gradient. A loss never sees the model: its gradient on [N] vectors is carried on here."""
        tally = Tally()

        def gradient(rows: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
            leaves = [x.detach().requires_grad_() for x in (logprobs, entropy)]
            with torch.enable_grad():
                loss, metrics = algo.loss(replace(_inputs(micro, leaves[0], leaves[1], weights, rows), whole=whole))
            tally.merge(metrics)
            self._seen.append((micro.segments[rows], logprobs))
            d_logprobs, d_entropy = torch.autograd.grad(loss, leaves, allow_unused=True)
            assert d_logprobs is not None, "a loss without log-probabilities trains nothing"
            tally.sum("signal", d_logprobs.abs())
            return d_logprobs, d_entropy

        embed, head = self.decoder.embed, self.decoder.head_weight
        # a foreign model may scale its embedding: there autograd forms the gradient
        by_hand = not isinstance(self.decoder, AutoDecoder)
        embedded = embed.detach().index_select(0, micro.tokens).requires_grad_() if by_hand else None
        hidden = self._predicting(self.decoder, micro, embedded)
        slope = gradient
        if not algo.per_token:  # it has to see all tokens first: their logits are computed once more for the gradient
            g, e = gradient(slice(None), *token_logprobs(hidden, head, micro.targets, self.temperature))
            slope = lambda rows, *_: (g[rows], None if e is None else e[rows])  # noqa: E731
        # By hand at both ends: autograd would fill and add a table of the vocabulary's size each time.
        total = self.optimizer.grad_of(head) if head.requires_grad else None
        d_hidden = gradient_through_head(hidden, head, total, micro.targets, self.temperature, slope)
        if d_hidden.is_cuda or bool(d_hidden.any()):  # to look would wait for the GPU
            hidden.backward(d_hidden)
            if embed.requires_grad and embedded is not None:
                assert embedded.grad is not None
                total = self.optimizer.grad_of(embed)
                total.index_add_(0, micro.tokens, embedded.grad.to(total.dtype))
        return tally

    def optim_step(self) -> dict[str, float]:
        """No signal, no step: momentum alone would move the weights. Non-finite: skip, count, give up after N."""
        lr = learning_rate(self.optim, self.update_index, self.num_updates)
        self.update_index += 1
        norm = global_norm(self.optimizer.grads())
        if not math.isfinite(norm):
            self.num_bad += 1
            if self.num_bad >= MAX_BAD:
                raise TrainingStopped(
                    f"{self.num_bad} updates in a row had non-finite gradients; lower optim.lr, or resume from an "
                    "earlier checkpoint"
                )
            return {"updates/bad": 1.0, "lr": lr}
        self.num_bad = 0
        if norm == 0.0:
            return {"updates/no_signal": 1.0, "grad_norm": 0.0, "lr": lr}
        clip = self.optim.clip_norm
        self.optimizer.step(lr, clip / norm if 0 < clip < norm else 1.0)
        if self.adapters is not None:
            self.adapters.merge()
        return {"updates/done": 1.0, "updates/clipped": float(0 < clip < norm), "grad_norm": norm, "lr": lr}

    # ---- log-probabilities -------------------------------------------------------------------------------------

    def _predicting(self, decoder: AnyDecoder, micro: Microbatch, embedded: Tensor | None = None) -> Tensor:
        """Hidden states where the targets are predicted, [N, d]: the head runs on these only."""
        if isinstance(decoder, AutoDecoder):
            return decoder(micro.tokens, micro.layout).index_select(0, micro.source)
        attend = packed_attention(micro.layout, decoder.embed, decoder.config.head_dim)
        return decoder(micro.tokens, micro.positions, attend, embedded).index_select(0, micro.source)

    @torch.no_grad()
    def _sample_logprobs(self, groups: Sequence[Group], decoder: AnyDecoder) -> Iterator[tuple[Any, list[float]]]:
        samples = [s for g in groups for s in g.samples]
        batch = pack(groups, self.token_budget, share=self.config.prefix_sharing)
        for micro in batch.minibatches[0].microbatches:
            for segment, row in _rows(micro.segments, self._logprobs(decoder, micro)):
                yield samples[segment], _spread(row, samples[segment])

    def _logprobs(self, decoder: AnyDecoder, micro: Microbatch) -> Tensor:
        """[N] of a microbatch's targets, on the host."""
        here = micro.to(decoder.embed.device)
        hidden = self._predicting(decoder, here)
        values, _ = token_logprobs(hidden, decoder.head_weight, here.targets, self.temperature, with_entropy=False)
        return values.cpu()

    @contextmanager
    def _reference_policy(self) -> Iterator[AnyDecoder]:
        if self.adapters is not None:
            with self.adapters.reference():
                yield self.decoder
        else:
            assert self.reference is not None, "the algorithm needs a reference policy and the learner has none"
            yield self.reference

    def _sum_grads(self) -> None:
        if self.world.size == 1:
            return
        for master in self.optimizer.masters.values():  # every rank joins, also one without a microbatch
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            self.world.sum(master.grad)

    # ---- weights and state ---------------------------------------------------------------------------------------

    def weights(self) -> LiveWeights:
        return LiveWeights(self.decoder)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        numbers = {"update_index": self.update_index, "num_bad": self.num_bad}
        adapters = {} if self.adapters is None else self.adapters.tensors()
        tensors = self.optimizer.state() | {ADAPTER + name: tensor for name, tensor in adapters.items()}
        if self.reference is not None and self.refresh_every:  # else it is the initial model
            tensors |= {REFERENCE + name: p.detach() for name, p in self.reference.named_parameters()}
        return tensors, {**numbers, "optimizer_steps": self.optimizer.num_steps}

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        self.update_index, self.num_bad = int(numbers["update_index"]), int(numbers["num_bad"])
        self.optimizer.load_state(tensors, int(numbers["optimizer_steps"]))
        if self.reference is not None and self.refresh_every:
            for name, p in self.reference.named_parameters():
                p.data.copy_(tensors[REFERENCE + name])
        if self.adapters is not None:
            self.adapters.load(adapter_tensors(tensors))


def adapter_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters in a learner's state, by their own names."""
    return {name.removeprefix(ADAPTER): t for name, t in tensors.items() if name.startswith(ADAPTER)}


def _rows(segments: Tensor, values: Tensor) -> Iterator[tuple[int, list[float]]]:
    """(sample, its values) of vectors in which samples lie end to end."""
    edges = [0, *(1 + (segments[1:] != segments[:-1]).nonzero().flatten()).tolist(), len(segments)]
    for begin, end in pairwise(edges):
        yield int(segments[begin]), values[begin:end].tolist()


def _spread(values: list[float], sample: Sample) -> list[float]:
    """Of the sampled tokens, for all tokens: 0 where nothing was sampled."""
    if len(values) == len(sample.tokens):
        return values
    at = iter(values)
    return [next(at) if p == Provenance.SAMPLED else 0.0 for p in sample.provenance]


def _packed_again(minibatch: Minibatch) -> Minibatch:
    """The same packs, with the log-probabilities that their samples have by now."""
    return replace(minibatch, microbatches=minibatch.repacked(minibatch.token_budget))


def _largest(minibatch: Minibatch) -> int:
    return max((len(m.tokens) for m in minibatch.microbatches), default=0)


def _inputs(micro: Microbatch, logprobs: Tensor, entropy: Tensor, weights: Tensor, rows: slice) -> LossInputs:
    return LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=None if micro.old_logprobs is None else micro.old_logprobs[rows].to(logprobs),
        ref_logprobs=None if micro.ref_logprobs is None else micro.ref_logprobs[rows].to(logprobs),
        sampler_logprobs=micro.sampler_logprobs[rows].to(logprobs),
        advantages=micro.advantages[rows].to(logprobs),
        weights=weights[rows].to(logprobs),
        segments=micro.segments[rows],
    )
