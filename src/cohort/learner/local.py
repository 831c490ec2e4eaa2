"""The step logic of the learner, the same for every backend: epochs, minibatches, denominators, clipping, retries.

It runs in one process, or as one of several data-parallel ranks (see `cohort.world`). It returns what it computed and
writes nothing into groups or batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.algorithm import Loss
from cohort.algos.tally import Tally
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.data.batch import Batch, Floats, Minibatch
from cohort.data.pack import longest_sample, make_batch, pack, pack_minibatch, with_old_logprobs
from cohort.data.transfer import copy_to_device
from cohort.errors import TrainingStopped
from cohort.learner.backend import make_backend
from cohort.learner.base import Annotations, Gradient, MicrobatchOptions, Update
from cohort.learner.minibatch import (
    MinibatchResult,
    TokenLoss,
    describe_layout,
    make_bare_group,
    make_token_logprobs,
    repack,
    scatter_to_samples,
    sum_counts,
)
from cohort.learner.optim import learning_rate
from cohort.learner.plan import MemoryPlan, measure_memory
from cohort.learner.state import StoredLearner
from cohort.models.auto import AnyDecoder
from cohort.models.lora import Adapters
from cohort.types import Group, Provenance
from cohort.world import Grid, World, in_phase

# Tokens per microbatch where the config sets no budget and there is no memory plan.
CPU_BUDGET = 2048
# Updates in a row with non-finite gradients after which the run stops. Each of them is skipped and counted.
MAX_BAD_UPDATES = 5


class LocalLearner(StoredLearner):
    """The learner of one process. It trains `decoder` in place, or its adapters.

    `num_updates` is the length of the learning rate schedule. `temperature` is that of sampling. `reference` is the
    frozen policy of the KL term; with adapters it is None, because the decoder without them is the reference. After
    every `refresh_every` steps the reference becomes the current policy; 0 = never. `world` are the ranks that train
    together, each with its own data, or a grid of them where several hold one model.
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
        refresh_every: int = 0,
        world: World | Grid | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.grid = world if isinstance(world, Grid) else (world or World()).split(1)
        self.world = self.grid.data
        self.backend = make_backend(decoder, optim, adapters, config.shard, self.grid)
        self.config, self.optim = config, optim
        self.temperature = temperature
        self.reference = self.backend.divide_reference(reference)
        self.num_updates = num_updates
        self.refresh_every = refresh_every
        self.token_budget = config.token_budget or CPU_BUDGET
        self._longest_sample = 0  # in tokens, of those that may still come; 0 = unknown
        self.plan: MemoryPlan | None = None
        self._fitting_budget = 0  # tokens per microbatch that fitted after memory had run out; 0 = it never ran out
        self._layout_reported = False
        self._notices: list[tuple[str, str]] = []

    def apply_plan(self, plan: MemoryPlan | None) -> None:
        """Sets the token budget and whether activations are recomputed, as the memory plan says; None changes neither.

        The plan is also stored, so that the next update reports how far off it was; None removes a stored plan. A
        learner on a CPU has no plan.
        """
        self.plan = plan
        if plan is not None:
            self.token_budget, self.decoder.recompute = plan.token_budget, plan.recompute

    def expect_samples(self, longest: int) -> None:
        """Tells the learner that no sample, prompt included, will have more than `longest` tokens.

        After memory has run out, the token budget of all later updates can then shrink, but not below `longest`.
        """
        self._longest_sample = longest

    # ---- the step --------------------------------------------------------------------------------------------

    @in_phase("the log-probabilities of samples")
    def annotate(
        self, groups: Sequence[Group], needs: Collection[str], loss_on: Provenance = Provenance.SAMPLED
    ) -> Annotations:
        """Returns log-probabilities of the samples: "old" by the current policy, "ref" by the reference, if in `needs`.

        The one that is not in `needs` is None. A sample gets one number per token, 0 where it is not of `loss_on`.
        Samples that `make_batch` leaves out, such as failed, masked and empty ones, get none. The groups stay
        unchanged. Raises ConfigError for a sample that exceeds the token budget.
        """
        begin = time.perf_counter()
        old = ref = None
        if needs:
            batch = make_batch(groups, loss_on=loss_on)
            minibatch = pack_minibatch(batch, 0, self.token_budget, self.config.prefix_sharing)
            if "old" in needs:
                self._annotated_at = self.update_index
                old = make_token_logprobs(batch, self._compute_logprobs(minibatch))
            if "ref" in needs:
                with self.backend.as_reference(self.reference):
                    ref = make_token_logprobs(batch, self._compute_logprobs(minibatch))
        return Annotations(old=old, ref=ref, seconds={"annotate": time.perf_counter() - begin})

    @in_phase("an update")
    def update(self, batch: Batch, algo: Loss) -> Update:
        """Trains the weights in place: in every epoch one call of `optim_step` per minibatch of the batch.

        Returns metrics over all ranks ("pack/..." are of this rank alone), notices for the user, and seconds per stage.
        It also returns the log-probabilities of samples that came without them, as in `Update`. May refresh the
        reference. Raises ConfigError for a sample that exceeds the token budget, and TrainingStopped as
        `forward_backward` and `optim_step` do.
        """
        begin = time.perf_counter()
        parts = pack(batch, self.token_budget, self.config.prefix_sharing)
        packed = time.perf_counter()
        packs = {
            "pack/microbatches": float(sum(len(m.microbatches) for m in parts)),
            "pack/tokens": float(sum(m.num_inputs for m in parts)),
        }
        self._report_layout(parts)
        # `tally` is summed over ranks at the end; `steps` has the same numbers on every rank.
        tally, steps = Tally(), Tally()
        known = {n for n, values in enumerate(batch.old_logprobs) if values is not None}
        old_logprobs: dict[int, Floats] = {}
        if algo.has_ratio:
            # Minibatches after the first are updated with moved weights: their old log-probabilities are needed now.
            for m in range(1, len(parts)):
                parts[m] = self._add_old_logprobs(parts[m], old_logprobs)
        for epoch in range(self.config.epochs):
            for minibatch in parts:
                with self._compare_with_plan(minibatch):
                    result = self.forward_backward(minibatch, algo)
                tally.merge(result.tally)
                # The weights had not moved before. Without a ratio there are no old ones: they tell what was trained.
                if epoch == 0 and (minibatch.index == 0 or not algo.has_ratio):
                    old_logprobs |= scatter_to_samples(batch, result.logprob_pieces)
                for name, value in self.optim_step().items():
                    exact = torch.tensor(value, dtype=torch.float64)
                    steps.add_sum(name, exact) if name.startswith("updates/") else steps.add_mean(name, exact)
            if algo.has_ratio and epoch == 0 and self.config.epochs > 1:
                parts[0] = self._add_old_logprobs(parts[0], old_logprobs)
        self._refresh_reference()
        notices, self._notices = self._notices, []
        return Update(
            old=make_token_logprobs(batch, {n: values for n, values in old_logprobs.items() if n not in known}),
            metrics=dict(sorted((tally.merge_ranks(self.world).to_metrics() | steps.to_metrics()).items())) | packs,
            notices=notices,
            seconds={"pack": packed - begin, "update": time.perf_counter() - packed},
        )

    def compute_gradient(
        self, batch: Batch, algo: Loss, options: MicrobatchOptions | None = None, world: World | None = None
    ) -> Gradient:
        """Returns the gradient (summed over ranks) and this rank's metrics of the batch's first minibatch.

        No optimizer step is made, and the masters have no gradients afterwards. The gradient is on the host, by
        parameter name, without parameters that have none. `options` says how the batch is cut into microbatches; None =
        as in `update`. A token budget below the longest sample is raised to its length. `world` replaces the learner's
        ranks for this call; None = its own.
        """
        options, own_world = options or MicrobatchOptions(), self.world
        budget = max(options.token_budget or self.token_budget, longest_sample(batch))
        minibatch = pack_minibatch(batch, 0, budget, self.config.prefix_sharing and options.share)
        if options.backwards:
            minibatch = replace(minibatch, microbatches=minibatch.microbatches[::-1])
        try:
            self.world = world or own_world
            metrics = self.forward_backward(minibatch, algo).tally.to_metrics()
        finally:
            self.world = own_world
        tensors = self.optimizer.full_grads()
        self.optimizer.zero_grad()
        return Gradient(tensors=tensors, metrics=metrics)

    @torch.no_grad()
    def measure(self, batch: Batch, algo: Loss) -> dict[str, float]:
        """Returns the metrics that a loss has on the first minibatch of a batch, over all ranks. Nothing is trained.

        There are no entropies, because they are not computed. Every rank must call it. Raises ConfigError for a sample
        that exceeds the token budget.
        """
        minibatch = pack_minibatch(batch, 0, self.token_budget, self.config.prefix_sharing)
        totals = sum_counts(minibatch, self.world)
        result = MinibatchResult()
        with self.backend.in_step(len(minibatch.microbatches)):
            for micro in minibatch.microbatches:
                weights = algo.weigh_tokens(Lengths(sample=micro.lengths, group=micro.group_lengths), totals)
                # The backend moves what it needs, and returns log-probabilities on the host: so the metrics stay there.
                loss = TokenLoss(algo, micro, weights, bool(weights.all()), totals, result)
                loss.measure(self.backend.logprobs(micro, self.temperature))
        metrics = result.tally.merge_ranks(self.world).to_metrics()
        return {name: value for name, value in metrics.items() if name != "entropy"}

    def _refresh_reference(self) -> None:
        """Copies the current policy into the reference model every `refresh_every` steps, counted by `update_index`.

        Does nothing at other steps, where `refresh_every` is 0, and where there is no reference model.
        """
        updates_per_refresh = self.refresh_every * self.config.epochs * self.config.minibatches
        if self.reference is not None and updates_per_refresh and self.update_index % updates_per_refresh == 0:
            self.backend.refresh(self.reference)

    def _add_old_logprobs(self, minibatch: Minibatch, old_logprobs: dict[int, Floats]) -> Minibatch:
        """Returns the minibatch with the log-probabilities before the step's first update in its microbatches.

        `old_logprobs` has those computed so far, by sample number. If it lacks a sample of the minibatch, those of the
        whole minibatch are computed with the current weights and added to this dict. A minibatch whose microbatches
        have them already is returned unchanged.
        """
        is_complete = all(m.old_logprobs is not None for m in minibatch.microbatches)
        is_known = old_logprobs.keys() >= set(minibatch.batch.sample_numbers(minibatch.index))
        # Called in any case, if need be for nothing: another rank may have something to compute, and ranks that divide
        # the weights make their passes together.
        missing = replace(minibatch, microbatches=[]) if is_complete or is_known else minibatch
        old_logprobs |= self._compute_logprobs(missing)
        return minibatch if is_complete else with_old_logprobs(minibatch, old_logprobs)

    def forward_backward(self, minibatch: Minibatch, algo: Loss) -> MinibatchResult:
        """Computes the gradient of a minibatch, summed over ranks, and leaves it in the gradients of the masters.

        Replaces gradients of earlier calls. Returns this rank's metrics and log-probabilities. Every rank must call it.
        Where memory runs out, it starts again with smaller microbatches; raises TrainingStopped where these cannot get
        smaller.
        """
        # Every rank makes each collective call once, however often it starts again. So they stay outside the retries,
        # but for sums that begin in the last backward, and these are not begun again.
        result = self._accumulate_gradients(minibatch, sum_counts(minibatch, self.world), algo)
        self.optimizer.reduce(self.world)
        return result

    def _accumulate_gradients(self, minibatch: Minibatch, totals: Totals, algo: Loss) -> MinibatchResult:
        """Adds up the gradients of all microbatches of this rank, from zero, and returns metrics and log-probabilities.

        Starts again with microbatches of about half the size whenever memory runs out; raises TrainingStopped where
        that is not possible. Where memory ran out in an earlier minibatch, it begins with the size that fitted then.
        `totals` are the denominators of the loss over all ranks.
        """
        # Memory ran out before with microbatches of this size.
        if self._fitting_budget and minibatch.largest_microbatch > self._fitting_budget:
            minibatch = repack(minibatch, max(self._fitting_budget, minibatch.longest_sample))
        while True:
            try:
                return self._run_microbatches(minibatch, totals, algo)
            except torch.OutOfMemoryError as error:
                reason = str(error).splitlines()[0]
            if not self.backend.can_retry:
                raise TrainingStopped(
                    f"out of memory with {minibatch.largest_microbatch} tokens in a microbatch ({reason}). Ranks that "
                    "divide the weights cannot start again one by one: resume the run on more ranks, or start a new "
                    "one with a lower --learner.token_budget."
                )
            # Outside the handler, because its exception keeps every tensor of the failed attempt in memory.
            minibatch = self._repack_smaller(minibatch, reason)

    def _repack_smaller(self, minibatch: Minibatch, reason: str) -> Minibatch:
        """Returns the minibatch in microbatches of about half the size, drops all gradients, and adds a warning.

        The new size is remembered for later minibatches; `token_budget` is lowered too, if it is known how long samples
        may be. `reason` is the message of the failure. Raises TrainingStopped if the longest sample allows no smaller
        microbatches.
        """
        largest = minibatch.largest_microbatch
        budget = max(minibatch.longest_sample, largest // 2)
        if budget >= largest:
            raise TrainingStopped(
                f"out of memory with a single sample of {minibatch.longest_sample} tokens in a microbatch ({reason}). "
                "Start a new run with a lower --sampling.max_tokens or a smaller model."
            )
        self.optimizer.zero_grad()
        if self.decoder.embed.is_cuda:
            torch.cuda.empty_cache()
        self._fitting_budget = budget
        # Where it is unknown how long a later sample may be, only `_fitting_budget` is remembered.
        if self._longest_sample:
            self.token_budget = min(self.token_budget, max(budget, self._longest_sample))
        text = f"out of memory: the update starts again with {budget} instead of {largest} tokens per microbatch"
        self._notices.append(("warning", text))
        return repack(minibatch, budget)

    def _run_microbatches(self, minibatch: Minibatch, totals: Totals, algo: Loss) -> MinibatchResult:
        """Removes all gradients, then adds up those of all microbatches, one after the other, in those of the masters.

        Returns metrics and log-probabilities. `totals` are the denominators of the loss over all ranks. Old
        log-probabilities are ignored if no update was made since `annotate` computed them: the current ones are the
        same. Lets torch.OutOfMemoryError pass to the caller.
        """
        self.optimizer.zero_grad()
        # If no weight has moved since the annotation, the current log-probabilities are the old ones, to the last bit.
        # The annotated ones are not: they come from another packing, with dead groups still in it.
        unmoved = self._annotated_at == self.update_index
        result = MinibatchResult()
        device = self.decoder.embed.device
        with self.backend.in_step(len(minibatch.microbatches)):
            for number, micro in enumerate(minibatch.microbatches, start=1):
                # Computed on the host, where a look at the values does not wait for a GPU.
                weights = algo.weigh_tokens(Lengths(sample=micro.lengths, group=micro.group_lengths), totals)
                all_in_loss = bool(weights.all())
                micro = micro.to(device)
                if unmoved:
                    micro = replace(micro, old_logprobs=None)
                loss = TokenLoss(algo, micro, copy_to_device(weights, device), all_in_loss, totals, result)
                if number == len(minibatch.microbatches):
                    self.optimizer.begin_reduce(self.world)
                self.backend.backward(micro, self.temperature, loss.compute_gradient, algo.per_token)
        return result

    def optim_step(self) -> dict[str, float]:
        """Makes one optimizer step with the present gradients and returns its metrics. A call advances `update_index`.

        The gradient is first scaled down to a norm of at most `optim.clip_norm` (0 = no limit). If it is exactly zero,
        no step is made, because momentum alone would move the weights. If it is not finite, the step is skipped;
        MAX_BAD_UPDATES such gradients in a row, zero ones not counted, raise TrainingStopped. Metrics are the learning
        rate, the gradient norm (if finite) and counts "updates/..." of what became of the step.
        """
        lr = learning_rate(self.optim, self.update_index, self.num_updates)
        self.update_index += 1
        norm = self.optimizer.grad_norm()
        if not math.isfinite(norm):
            self.num_bad += 1
            if self.num_bad >= MAX_BAD_UPDATES:
                raise TrainingStopped(
                    f"{self.num_bad} updates in a row had non-finite gradients (NaN or infinite) and were skipped. "
                    "If the policy_loss is your own, correct it and resume the run. Otherwise start a new run with a "
                    "lower --optim.lr, or move the newest checkpoints out of the run's folder and resume it."
                )
            return {"updates/bad": 1.0, "lr": lr}
        # An update without a signal says nothing about the others: bad ones before and after it are in a row.
        if norm == 0.0:
            return {"updates/no_signal": 1.0, "grad_norm": 0.0, "lr": lr}
        self.num_bad = 0
        clip = self.optim.clip_norm
        self.backend.step(lr, clip / norm if 0 < clip < norm else 1.0)
        return {"updates/done": 1.0, "updates/clipped": float(0 < clip < norm), "grad_norm": norm, "lr": lr}

    @in_phase("a comparison with the engine")
    def compute_logprobs(self, tokens: list[int]) -> list[float]:
        """Returns the log-probability of every token after the first, by the current policy at temperature 1.

        Every rank must call it.
        """
        batch = make_batch([make_bare_group(tokens)])
        budget = max(self.token_budget, len(tokens))
        found = self._compute_logprobs(pack_minibatch(batch, 0, budget, share=False), temperature=1.0)
        return [float(value) for value in found[0]]

    @torch.no_grad()
    def _compute_logprobs(self, minibatch: Minibatch, temperature: float | None = None) -> dict[int, Floats]:
        """Returns the log-probabilities [T] of the minibatch's samples, by sample number; 0 where a token is no target.

        They are those of the current policy, or of the reference inside `Backend.as_reference`. `temperature` None =
        that of sampling.
        """
        micros = minibatch.microbatches
        temperature = self.temperature if temperature is None else temperature
        with self.backend.in_step(len(micros)):
            pieces = [(m.segments, self.backend.logprobs(m, temperature)) for m in micros]
        return scatter_to_samples(minibatch.batch, pieces)

    # ---- notices ---------------------------------------------------------------------------------------------

    def _report_layout(self, parts: Sequence[Minibatch]) -> None:
        """Adds a notice at the first update with samples: how many tokens it has, whether and why prompts are shared.

        `parts` are all minibatches of the update. Later calls do nothing.
        """
        if self._layout_reported or not any(minibatch.microbatches for minibatch in parts):
            return
        self._layout_reported = True
        self._notices.append(("info", describe_layout(parts, self.token_budget, self.config.prefix_sharing)))

    @contextmanager
    def _compare_with_plan(self, minibatch: Minibatch) -> Iterator[None]:
        """Context around forward and backward of a minibatch. The first one is compared with the memory plan, if set.

        It adds two notices. The plan is dropped, so later calls do nothing. A minibatch without microbatches is not
        measured.
        """
        if self.plan is None or not minibatch.microbatches:
            yield
            return
        plan, self.plan = self.plan, None
        with measure_memory(plan, self.decoder.embed.device, minibatch.largest_microbatch, self._notices):
            yield
