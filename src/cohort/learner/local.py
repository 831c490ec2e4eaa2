"""The step logic of the learner, written once for every backend: epochs, minibatches, denominators, clipping, retries.

It runs in one process, or as one of several data-parallel ranks (see `cohort.world`). It returns what it found: nothing
is written into groups or batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.algorithm import Loss
from cohort.algos.tally import Tally
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.data.batch import Batch, Floats, Minibatch
from cohort.data.pack import longest_sample, make_batch, pack, pack_minibatch, with_old_logprobs
from cohort.data.transfer import put
from cohort.errors import TrainingStopped
from cohort.learner.backend import make_backend
from cohort.learner.base import Annotations, Cut, Gradient, LiveWeights, Snapshot, Update
from cohort.learner.minibatch import Result, TokenLoss, by_sample, found_of, packed_again
from cohort.learner.optim import Optimizer, global_norm, learning_rate
from cohort.learner.plan import Plan
from cohort.models.auto import AnyDecoder
from cohort.models.lora import Adapters
from cohort.types import Group
from cohort.world import World

CPU_BUDGET = 2048  # tokens per microbatch where none are asked for and nothing is planned
MAX_BAD = 5  # updates in a row with non-finite gradients, each skipped and counted, before the run stops
REFERENCE = "reference/"  # what a reference that moves is called in the state, before its names


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
        self.backend = make_backend(decoder, optim, adapters)
        self.config, self.optim = config, optim
        self.temperature, self.reference, self.world = temperature, reference, world or World()
        self.num_updates = num_updates
        self.refresh_every = 0  # steps; 0 = the reference stays
        self.token_budget = config.token_budget or CPU_BUDGET
        self.least_budget = 0  # below which a permitted sample would not fit
        self.plan: Plan | None = None
        self.update_index = 0  # updates attempted: the schedule's clock, advanced also by those without signal
        self.num_bad = 0  # consecutive updates with non-finite gradients
        self._fitting = 0  # tokens per microbatch that memory was found to hold; 0 = it never ran out
        self._annotated = -1  # update_index at which old log-probabilities were last annotated
        self._layout_told = False
        self._notices: list[tuple[str, str]] = []

    @property
    def decoder(self) -> AnyDecoder:
        return self.backend.decoder

    @property
    def adapters(self) -> Adapters | None:
        return self.backend.adapters

    @property
    def optimizer(self) -> Optimizer:
        return self.backend.optimizer

    def follow(self, plan: Plan | None) -> None:
        """Use a GPU's memory as planned; the first update tells how wrong the plan was."""
        self.plan = plan
        if plan is not None:
            self.token_budget, self.decoder.recompute = plan.token_budget, plan.recompute

    # ---- the step --------------------------------------------------------------------------------------------

    def annotate(self, groups: Sequence[Group], needs: Collection[str]) -> Annotations:
        """Old log-probabilities are those of the current policy. Excluded groups and failed samples get none."""
        begin = time.perf_counter()
        old = ref = None
        if needs:
            batch = make_batch(groups)
            minibatch = pack_minibatch(batch, 0, self.token_budget, self.config.prefix_sharing)
            if "old" in needs:
                self._annotated = self.update_index
                old = found_of(batch, self._logprobs(minibatch))
            if "ref" in needs:
                with self.backend.as_reference(self.reference):
                    ref = found_of(batch, self._logprobs(minibatch))
        return Annotations(old=old, ref=ref, seconds={"annotate": time.perf_counter() - begin})

    def update(self, batch: Batch, algo: Loss) -> Update:
        begin = time.perf_counter()
        parts = pack(batch, self.token_budget, self.config.prefix_sharing)
        packed = time.perf_counter()
        packs = {
            "pack/microbatches": float(sum(len(m.microbatches) for m in parts)),
            "pack/tokens": float(sum(m.num_inputs for m in parts)),
        }
        self._tell_layout(parts)
        tally, steps = Tally(), Tally()  # summed over ranks, and the same on every rank
        known = {n for n, values in enumerate(batch.old_logprobs) if values is not None}
        found: dict[int, Floats] = {}
        if algo.has_ratio:
            for m in range(1, len(parts)):  # their own updates will find other weights
                parts[m] = self._with_old(parts[m], found)
        for epoch in range(self.config.epochs):
            for minibatch in parts:
                with self._compared_with_plan(minibatch):
                    result = self.forward_backward(minibatch, algo)
                tally.merge(result.tally)
                if epoch == 0 and minibatch.index == 0 and algo.has_ratio:
                    found |= by_sample(batch, result.seen)
                for name, value in self.optim_step().items():
                    exact = torch.tensor(value, dtype=torch.float64)
                    steps.sum(name, exact) if name.startswith("updates/") else steps.mean(name, exact)
            if algo.has_ratio and epoch == 0 and self.config.epochs > 1:
                parts[0] = self._with_old(parts[0], found)  # with what its first update saw
        self._refresh_reference()
        notices, self._notices = self._notices, []
        return Update(
            old=found_of(batch, {n: values for n, values in found.items() if n not in known}),
            metrics=dict(sorted((tally.over(self.world).to_metrics() | steps.to_metrics()).items())) | packs,
            notices=notices,
            seconds={"pack": packed - begin, "update": time.perf_counter() - packed},
        )

    def gradient(self, batch: Batch, algo: Loss, cut: Cut | None = None, world: World | None = None) -> Gradient:
        cut, own = cut or Cut(), self.world
        budget = max(cut.token_budget or self.token_budget, longest_sample(batch))
        minibatch = pack_minibatch(batch, 0, budget, self.config.prefix_sharing and cut.share)
        if cut.backwards:
            minibatch = replace(minibatch, microbatches=minibatch.microbatches[::-1])
        try:
            self.world = world or own
            metrics = self.forward_backward(minibatch, algo).tally.to_metrics()
        finally:
            self.world = own
        masters = self.optimizer.masters.items()
        tensors = {name: m.grad.detach().to("cpu", copy=True) for name, m in masters if m.grad is not None}
        self.optimizer.zero_grad()
        return Gradient(tensors=tensors, metrics=metrics)

    def _refresh_reference(self) -> None:
        """After every `refresh_every` steps the reference becomes the current policy."""
        every = self.refresh_every * self.config.epochs * self.config.minibatches  # updates
        if self.reference is not None and every and self.update_index % every == 0:
            self.reference.load_state_dict(self.decoder.state_dict())

    def _with_old(self, minibatch: Minibatch, found: dict[int, Floats]) -> Minibatch:
        """With log-probabilities of before the first update; they are added to `found` where they are missing there."""
        if all(m.old_logprobs is not None for m in minibatch.microbatches):
            return minibatch
        if not found.keys() >= set(minibatch.batch.members(minibatch.index)):
            found |= self._logprobs(minibatch)
        return with_old_logprobs(minibatch, found)

    def forward_backward(self, minibatch: Minibatch, algo: Loss) -> Result:
        """The gradient of a minibatch, summed over ranks. Where memory runs out, it starts again in smaller parts."""
        # what ranks do together happens once, however often one of them starts again
        c = minibatch.counts
        counts = torch.tensor([c.num_tokens, c.num_samples, c.num_prompts], dtype=torch.float64)
        num_tokens, num_samples, num_prompts = self.world.sum(counts).tolist()
        totals = Totals(num_tokens=num_tokens, num_samples=num_samples, num_prompts=num_prompts)
        result = self._accumulated(minibatch, totals, algo)
        self._sum_grads()
        return result

    def _accumulated(self, minibatch: Minibatch, totals: Totals, algo: Loss) -> Result:
        """The gradients of all microbatches."""
        if self._fitting and minibatch.largest > self._fitting:  # it ran out before
            minibatch = packed_again(minibatch, max(self._fitting, minibatch.longest))
        while True:
            try:
                return self._attempt(minibatch, totals, algo)
            except torch.OutOfMemoryError as error:
                reason = str(error).splitlines()[0]
            # outside the handler, whose exception holds every tensor of the attempt
            minibatch = self._in_smaller_parts(minibatch, reason)

    def _in_smaller_parts(self, minibatch: Minibatch, reason: str) -> Minibatch:
        largest = minibatch.largest
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
        if self.least_budget:  # else nobody says how long a later sample may be, and `_fitting` alone is remembered
            self.token_budget = min(self.token_budget, max(budget, self.least_budget))
        text = f"out of memory: the update starts again with {budget} instead of {largest} tokens a microbatch"
        self._notices.append(("warning", text))
        return packed_again(minibatch, budget)

    def _attempt(self, minibatch: Minibatch, totals: Totals, algo: Loss) -> Result:
        self.optimizer.zero_grad()
        # Nothing has moved since the annotation: the current log-probabilities are the old ones, to the last bit,
        # which those of another packing (dead groups have left it) are not.
        unmoved = self._annotated == self.update_index
        result = Result()
        device = self.decoder.embed.device
        for micro in minibatch.microbatches:
            # on the host, where looking costs nothing
            weights = algo.weigh(Lengths(sample=micro.lengths, group=micro.group_lengths), totals)
            whole = bool(weights.all())
            micro = micro.to(device)
            if unmoved:
                micro = replace(micro, old_logprobs=None)
            loss = TokenLoss(algo, micro, put(weights, device), whole, result)
            self.backend.backward(micro, self.temperature, loss.gradient, algo.per_token)
        return result

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
        self.backend.step(lr, clip / norm if 0 < clip < norm else 1.0)
        return {"updates/done": 1.0, "updates/clipped": float(0 < clip < norm), "grad_norm": norm, "lr": lr}

    @torch.no_grad()
    def _logprobs(self, minibatch: Minibatch) -> dict[int, Floats]:
        """[T] of every sample, by its number: those of the policy that the backend holds now."""
        micros = minibatch.microbatches
        seen = [(m.segments, self.backend.logprobs(m, self.temperature)) for m in micros]
        return by_sample(minibatch.batch, seen)

    def _sum_grads(self) -> None:
        if self.world.size == 1:
            return
        for master in self.optimizer.masters.values():  # every rank joins, also one without a microbatch
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            self.world.sum(master.grad)

    # ---- what is told ----------------------------------------------------------------------------------------

    def _tell_layout(self, parts: Sequence[Minibatch]) -> None:
        """Once: how this run's batches are laid out, and why."""
        micro = [m for minibatch in parts for m in minibatch.microbatches]
        if self._layout_told or not micro:
            return
        self._layout_told = True
        num, sizes = sum(len(m.tokens) for m in micro), [s.size for m in micro for s in m.layout.spans]
        prompts = {(i, s.prompt): s.size for i, m in enumerate(micro) for s in m.layout.spans if s.size}
        alone = num + sum(sizes) - sum(prompts.values())
        why = "each sample with its own prompt: " + ("little to share" if self.config.prefix_sharing else "as asked")
        if prompts:
            why = f"prompts once a group (once a sample would be {alone} tokens)"
        self._notices.append(("info", f"an update takes {num} tokens, at most {self.token_budget} at a time: {why}"))

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
        off = 100 * (plan.update_of(minibatch.largest) / used - 1)
        took = f"{used / 2**30:.1f} GiB with {minibatch.largest} tokens at a time"
        self._notices.append(("info", plan.words))
        self._notices.append(("info", f"the first update took {took}: the plan is {off:+.0f}% off"))

    # ---- weights and state -----------------------------------------------------------------------------------

    def weights(self) -> LiveWeights:
        return LiveWeights(self.decoder)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = self.backend.state()
        if self.reference is not None and self.refresh_every:  # else it is the initial model
            tensors |= {REFERENCE + name: p.detach() for name, p in self.reference.named_parameters()}
        numbers = {"update_index": self.update_index, "num_bad": self.num_bad}
        return tensors, {**numbers, "optimizer_steps": self.optimizer.num_steps}

    def _load_numbers(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        self.update_index, self.num_bad = int(numbers["update_index"]), int(numbers["num_bad"])
        self._annotated = -1  # what was annotated before was of other weights
        self.backend.load_state(tensors, int(numbers["optimizer_steps"]))

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        self._load_numbers(tensors, numbers)
        if self.reference is not None and self.refresh_every:
            for name, p in self.reference.named_parameters():
                p.data.copy_(tensors[REFERENCE + name])

    def snapshot(self) -> Snapshot:
        tensors, numbers = self.state()
        # masters also where they are the weights: another learner's may be of another type
        masters = {f"master/{name}": master for name, master in self.optimizer.masters.items()}
        return Snapshot(
            weights=_on_host(self.decoder.state_dict()),
            tensors=_on_host(tensors | masters),
            numbers=numbers,
            reference=None if self.reference is None else _on_host(self.reference.state_dict()),
            num_updates=self.num_updates,
        )

    def restore(self, snapshot: Snapshot) -> None:
        self.num_updates = snapshot.num_updates
        if self.adapters is None:
            self.decoder.load_state_dict(snapshot.weights)
        self._load_numbers(snapshot.tensors, snapshot.numbers)
        if self.reference is not None and snapshot.reference is not None:
            self.reference.load_state_dict(snapshot.reference)


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
