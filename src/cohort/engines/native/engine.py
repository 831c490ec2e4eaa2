"""The native engine in plain torch: continuous batching on the learner's own weights.

Running drafts fill the slots 0 .. n - 1. A step computes one token for all of them. A draft that ends leaves at once,
the last slot moves into the gap, and waiting drafts take the free slots. A prompt is computed and stored once per
group. Python looks at no single sample in every step: tokens are read back from the device in bulk.

The KV of a request with `keep` is copied out of its slot when it ends, and into a slot again when another request
continues it, so that each token of a conversation is computed once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from cohort.engines.base import Abilities, Event, Request, Weights, WorkCounters
from cohort.engines.native.attention import (
    PromptPlan,
    make_decode_attend,
    make_extend_attend,
    make_prefill_attend,
    plan_prompts,
)
from cohort.engines.native.draft import NativeDraft, WaitingDrafts
from cohort.engines.native.kept import KeptStore
from cohort.engines.native.kv import Arena, Prefix, PrefixStore, round_to_length_class
from cohort.engines.native.packed import PackedWeights
from cohort.engines.native.random import derive_random_stream
from cohort.engines.native.sampler import draw_tokens
from cohort.engines.native.slots import Slots
from cohort.engines.requests import (
    check_engine_limits,
    check_request,
    closed_engine_error,
    damaged_weights_error,
    unknown_request_error,
)
from cohort.engines.weights import copy_weights
from cohort.models.decoder import Attend, Decoder
from cohort.models.functions import multiply_wide
from cohort.types import Finish, Sample

PREFILL_TOKENS = 2048  # most prompt tokens in one forward (a longer prompt has a forward of its own)
# Own tokens of a slot, and slots, in one forward: together they bound the attention scores in memory.
EXTEND_TOKENS = 256
EXTEND_ROWS = 32
FIRST_ROOM = 64  # own tokens that a slot has room for at first
MAX_LOGITS = 1 << 24  # most logits in memory at once


class NativeEngine:
    """Samples with a decoder whose storage it shares with the learner.

    `tokenizer_decode` turns ids into text, for `Sample.text` and stop strings only. `max_context` bounds prompt
    plus completion, in tokens. `slots` is the most requests decoded together. `weights` = "packed" samples from copies
    laid out for the processor; "fp16" from copies with half as many bytes, which is faster still but not exact.
    `window` is the number of steps between reports: a server wants 1, training can have any number.
    """

    name = "native"
    abilities = Abilities()

    def __init__(
        self,
        decoder: Decoder,
        tokenizer_decode: Callable[[list[int]], str],
        slots: int,
        max_context: int,
        weights: Literal["shared", "packed", "fp16"] = "shared",
        window: int = 8,
    ) -> None:
        check_engine_limits(slots, window, max_context, decoder.config.max_positions)
        dtype, device = decoder.embed.dtype, decoder.embed.device
        self.decoder, self.decode = decoder, tokenizer_decode
        self.num_slots = slots
        self.max_context = max_context
        self.window = window
        self.packed = None if weights == "shared" else PackedWeights(decoder, weights, slots)
        self.version = 0
        self.work = WorkCounters()
        self.drafts: dict[str, NativeDraft] = {}  # all drafts that have not ended, by request id
        self.waiting = WaitingDrafts()
        self.running: list[NativeDraft] = []  # by slot
        float_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        # One token more than the window: a draft gets its first token when it enters, before the steps of the window.
        self.slots = Slots(slots, window + 1, float_dtype, device)
        self.arena = Arena(decoder.config, dtype, device)
        self.prefixes = PrefixStore(decoder.config, dtype, device)
        self.kept = KeptStore(self.prefixes)
        self._prompt_plan: PromptPlan | None = None  # how the running drafts read their prompts; None = to be planned
        self._events: list[Event] = []
        self._has_damaged_kv = False
        self._closed = False

    # ---- protocol

    def submit(self, request: Request) -> None:
        """Queues a request. Requests with the same shared tokens store their KV once, in one prefix.

        Raises ConfigError for a request that can never be served or whose id is under way, EngineError after `close`.
        """
        if self._closed:
            raise closed_engine_error(self.name)
        check_request(request, self.max_context, self.decoder.config.vocab_size, self.drafts)
        kept = self.kept.take_kept(request)
        # Both -1 and 0 make the whole prompt the prefix.
        shared = request.shared if request.shared > 0 else len(request.tokens)
        # Kept KV brings its prefix along, and its use of it.
        prefix = self.prefixes.add_user(tuple(request.tokens[:shared])) if kept is None else kept.prefix
        draft = NativeDraft(
            request=request,
            random_stream=derive_random_stream(request.key),
            prefix=prefix,
            own_prompt=list(request.tokens[len(prefix.tokens) :]),
            kept=kept,
        )
        self.drafts[request.id] = draft
        self.waiting.add(draft)
        if request.continues:
            # What cannot be continued was dropped, and its pool may have moved another prefix into the gap.
            self._prompt_plan = None
        # The id names another request from now on.
        self.forget(request.id)

    @property
    def idle(self) -> bool:
        """Whether no request is under way and no event waits to be reported."""
        return not self.drafts and not self._events

    @torch.no_grad()
    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Runs up to `self.window` decode steps and returns the events: new tokens per request, and samples that ended.

        Before each step waiting requests may take free slots, see `_admit_waiting`. If no request is left and no KV is
        kept, the memory of KV and packed weights is freed. `timeout` is ignored, because the work is done in this
        process. Raises ModelError if a log-probability is not finite, and then again until `load` brings other weights.
        """
        # The windows of the slots still have the tokens before the error, and room for no more.
        if self._has_damaged_kv:
            raise damaged_weights_error(self.version)
        for _ in range(self.window):
            self._admit_waiting()
            if not self.running:
                break
            self._run_step()
        self._free_slots(self._read_slots(range(len(self.running))))
        self._release_if_unused()
        events, self._events = self._events, []
        return events

    def abort(self, id: str) -> Sample:
        """Stops a running or waiting request and returns its sample so far, with finish = abort.

        If no request is left and no KV is kept, frees memory like `release`. Raises CohortError for an unknown id.
        """
        draft = self.drafts.get(id)
        if draft is None:
            raise unknown_request_error(id)
        draft.finish = Finish.ABORT
        if draft in self.running:
            self._free_slots([self.running.index(draft)])
        else:
            self.waiting.remove(draft)
            self._drop_draft(draft)
        # `poll` would release the memory too, but a caller may never poll an idle engine.
        self._release_if_unused()
        return draft.to_sample(self.decode)

    def forget(self, id: str) -> None:
        """Drops the KV that is kept for an ended request, if there is any.

        If it was the last, and no request is under way, frees memory like `release`.
        """
        if id in self.kept:
            self.kept.remove(id)
            # The pool may have moved another prefix into the gap.
            self._prompt_plan = None
            self._release_if_unused()

    def load(self, weights: Weights, version: int) -> None:
        """Samples from `weights` from now on, as `version`. Weights of another decoder are copied into this one.

        All cached KV, kept or in use, and packed copies are dropped: running requests wait again until their KV is
        recomputed.
        """
        if weights.module is not self.decoder:
            copy_weights(weights, self.decoder)
        if self.packed is not None:
            self.packed.drop_copies()
        # KV that is not finite must not be read again, not even with attention weight zero: 0 * NaN is NaN.
        # Without requests only kept KV can be left, and the learner may need its memory.
        if self._has_damaged_kv or not self.drafts:
            self.release()
        self.version = version
        self._requeue_all()
        self.prefixes.drop_computed()
        self._prompt_plan = None
        self._has_damaged_kv = False

    def close(self) -> None:
        """Drops every request and frees all KV and packed weights. A later `submit` raises EngineError."""
        # `abort` is not used here: an engine that was interrupted in the middle of a step must be able to close.
        self.drafts.clear()
        self.waiting = WaitingDrafts()
        self.running = []
        self.kept.by_id.clear()
        self._events = []
        self.release()
        self._closed = True

    def release(self) -> None:
        """Frees all cached KV, kept or in use, and packed weights. Running requests wait again, to be recomputed."""
        self._requeue_all()
        self.prefixes.release()
        self.arena.release()
        if self.packed is not None:
            self.packed.drop_copies()
        self._prompt_plan = None

    def _release_if_unused(self) -> None:
        """Frees memory like `release` if no request is under way and no KV is kept: the learner may need it now."""
        if not self.drafts and not self.kept:
            self.release()

    def _requeue_all(self) -> None:
        """Puts running requests back into the queue, before the waiting ones, and drops all kept KV."""
        self.waiting.put_back_first(self.running)
        self.running = []
        for draft in self.waiting:
            # The draft itself still uses the prefix.
            draft.kept = None
        self.kept.clear()

    # ---- entering

    def _admit_waiting(self) -> None:
        """Gives free slots to waiting drafts, computes the KV of their known tokens and draws one token for each.

        Does nothing if none waits, or if other drafts run and less than a sixteenth of the slots is free.
        """
        free = self.num_slots - len(self.running)
        # A prefill of few prompts is slow: while drafts run, wait until a sixteenth of the slots is free.
        if not self.waiting or (self.running and free < -(-self.num_slots // 16)):
            return
        entering = sorted(self.waiting.pop_next(free), key=lambda d: d.num_uncomputed)
        begin = time.perf_counter()
        # Siblings share a prefix object, so each missing prefix is computed once.
        missing = {id(d.prefix): d.prefix for d in entering if d.prefix.pool is None}
        self._prefill_prefixes(sorted(missing.values(), key=lambda p: len(p.tokens)))
        first = len(self.running)
        self.running += entering
        self._prompt_plan = None
        self.slots.place_drafts(entering, first)
        self.slots.note_used_options(self.running)
        for draft in entering:
            draft.set_version(self.version)
        hidden = self._compute_own_tokens(entering, first)
        for draft in entering:
            draft.kept = None
        self.work.prefill_seconds += time.perf_counter() - begin
        self._draw_tokens(first, hidden)

    def _prefill_prefixes(self, prefixes: list[Prefix]) -> None:
        """Computes and stores the KV and the last hidden state of prefixes, several per forward.

        A forward has at most PREFILL_TOKENS tokens, or one prefix. `prefixes` must be sorted by length.
        """
        while prefixes:
            # Take as many prefixes as PREFILL_TOKENS allows, at least one.
            num, total = 0, 0
            while num < len(prefixes) and (num == 0 or total + len(prefixes[num].tokens) <= PREFILL_TOKENS):
                total += len(prefixes[num].tokens)
                num += 1
            now, prefixes = prefixes[:num], prefixes[num:]
            batches: dict[int, list[Prefix]] = {}
            for prefix in now:
                self.prefixes.allocate(prefix)
                batches.setdefault(round_to_length_class(len(prefix.tokens)), []).append(prefix)
            tokens = self._make_tensor([t for p in now for t in p.tokens])
            positions = self._make_tensor([i for p in now for i in range(len(p.tokens))])
            hidden = self._run_decoder(tokens, positions, make_prefill_attend(list(batches.values())))
            end = -1
            for prefix in now:
                end += len(prefix.tokens)
                # A clone, because a view would keep the hidden states of all tokens in memory.
                prefix.last_hidden = hidden[end].clone()
            self.work.num_prompt_tokens += total

    def _compute_own_tokens(self, entering: list[NativeDraft], first: int) -> Tensor:
        """Computes the KV of the tokens after the prefix, for drafts that enter the slots from `first` on.

        Returns the hidden states to draw from, [n, d]: those of each draft's last own token, or of its prefix's last
        token if it has no own ones. Kept KV is copied into the slots first. `entering` must be sorted by the number of
        own tokens to compute, least first, so that the drafts which still have some are always the last ones.
        """
        lasts = [d.prefix.last_hidden for d in entering]
        assert all(h is not None for h in lasts)
        hidden = torch.stack([h for h in lasts if h is not None])
        for low in range(0, len(entering), EXTEND_ROWS):
            part = entering[low : low + EXTEND_ROWS]
            longest = max(d.num_own_tokens for d in part)
            self.arena.reserve(len(self.running), max(longest + 1, FIRST_ROOM))
            self._restore_kept(part, first + low)
            for num_done in range(0, part[-1].num_uncomputed, EXTEND_TOKENS):
                begin = next(i for i, d in enumerate(part) if d.num_uncomputed > num_done)
                self._extend_slots(part[begin:], first + low + begin, num_done, hidden[low + begin : low + len(part)])
        return hidden

    def _restore_kept(self, drafts: list[NativeDraft], first: int) -> None:
        """Copies the kept KV of drafts, where they have any, into the slots from `first` on. `slots.own_length` grows.

        The arena must have room for it.
        """
        for slot, draft in enumerate(drafts, first):
            if draft.kept is not None and draft.kept.tokens:
                assert draft.kept.kv is not None
                self.arena.copy_in(slot, draft.kept.kv[:, :, :, : draft.num_kept])
                self.slots.own_length[slot] = draft.num_kept

    def _extend_slots(self, drafts: list[NativeDraft], first: int, num_done: int, hidden: Tensor) -> None:
        """Computes up to EXTEND_TOKENS more own tokens for each of the drafts in the slots from `first` on.

        Beside the kept ones, `num_done` own tokens of each are computed already, and each has more. The hidden state of
        the last token that was computed for each draft is written to `hidden` [n, d], and `slots.own_length` grows.
        """
        done = [d.num_kept + num_done for d in drafts]
        todo = [(d.own_prompt + d.tokens)[n : n + EXTEND_TOKENS] for d, n in zip(drafts, done, strict=True)]
        counts = [len(t) for t in todo]
        prompts = plan_prompts([d.prefix for d in drafts], self.arena.dtype, self.arena.device)
        starts = [len(d.prefix.tokens) + n for d, n in zip(drafts, done, strict=True)]
        tokens = self._make_tensor([t for own in todo for t in own])
        positions = self._make_tensor([s + i for s, n in zip(starts, counts, strict=True) for i in range(n)])
        states = self._run_decoder(tokens, positions, make_extend_attend(self.arena, prompts, first, done, counts))
        ends = self._make_tensor(counts).cumsum(0) - 1
        hidden.copy_(states.index_select(0, ends))
        self.slots.own_length[first : first + len(drafts)] += self._make_tensor(counts)
        self.work.num_prompt_tokens += len(tokens)

    # ---- a step

    def _run_step(self) -> None:
        """Computes the last token of every running draft and draws the next, see `_draw_tokens`."""
        begin = time.perf_counter()
        n, s = len(self.running), self.slots
        if self._prompt_plan is None:
            self._prompt_plan = plan_prompts([d.prefix for d in self.running], self.arena.dtype, self.arena.device)
        longest = int(s.own_length[:n].max())
        self.arena.reserve(n, max(longest + 1, FIRST_ROOM))
        attend = make_decode_attend(self.arena, self._prompt_plan, s.own_length[:n], longest)
        hidden = self._run_decoder(s.last_token[:n], s.prefix_length[:n] + s.own_length[:n], attend)
        s.own_length[:n] += 1
        self.work.num_steps += 1
        self.work.decode_seconds += time.perf_counter() - begin
        self._draw_tokens(0, hidden)

    def _draw_tokens(self, first: int, hidden: Tensor) -> None:
        """Draws and records one token for each of the slots from `first` on, from their hidden states [n, d].

        Drafts that end leave their slots, and `poll` will report them. Raises ModelError if a log-probability is not
        finite; then no draft leaves.
        """
        begin = time.perf_counter()
        # The rows are drawn in chunks, because the logits of all rows could fill the memory.
        chunk = max(1, MAX_LOGITS // self.decoder.config.vocab_size)
        done, finite = [], True
        for low in range(0, len(hidden), chunk):
            part = hidden[low : low + chunk]
            here = slice(first + low, first + low + len(part))
            with self._use_packed_weights():
                logits = multiply_wide(part, self.decoder.head_weight)
            drawn = draw_tokens(logits, self.slots.get_settings(here), self.slots.draw_uniforms(here))
            finite = finite and bool(drawn.logprobs.isfinite().all())
            done.append(self.slots.record_tokens(here, drawn))
        self.work.num_drawn += len(hidden)
        if not finite:
            self._has_damaged_kv = True
            raise damaged_weights_error(self.version)
        slots = (first + torch.cat(done).nonzero()[:, 0]).tolist()
        if slots:
            self._free_slots(self._read_slots(slots))
        self.work.draw_seconds += time.perf_counter() - begin

    def _run_decoder(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the final hidden states [T, d] of tokens [T] at positions [T]; `attend` computes the attention.

        Products use the packed copies of the weights if the engine has them.
        """
        with self._use_packed_weights():
            hidden: Tensor = self.decoder(tokens, positions, attend)
        return hidden

    def _use_packed_weights(self) -> AbstractContextManager[None]:
        """Returns a context in which matrix products use the packed copies of the weights, if the engine has them."""
        return nullcontext() if self.packed is None else self.packed.use()

    # ---- leaving

    def _read_slots(self, slots: Sequence[int]) -> list[int]:
        """Adds the tokens drawn since the last read to the drafts of these slots, and queues one event per slot.

        Returns those of the slots whose draft has ended. They are not freed yet.
        """
        ended: list[int] = []
        if not slots:
            return ended
        for slot, drawn in zip(slots, self.slots.read_and_clear(slots), strict=True):
            draft = self.running[slot]
            self._events.append(draft.add_and_report(*drawn, self.decode))
            if draft.finish is not None:
                ended.append(slot)
        return ended

    def _free_slots(self, slots: Sequence[int]) -> None:
        """Drops the drafts of these slots, without an event, and keeps the KV of those that ask for it.

        The last running drafts, with KV, move into the gaps.
        """
        if not slots:
            return
        gone, before = set(slots), len(self.running)
        for slot in slots:
            self._keep_kv(slot)
            self._drop_draft(self.running[slot])
        # The first `after` slots stay in use: drafts behind them move into the gaps among them.
        after = before - len(gone)
        target = sorted(slot for slot in gone if slot < after)
        source = [slot for slot in range(after, before) if slot not in gone]
        if source:
            self.arena.move_sequences(source, target, int(self.slots.own_length[source].max()))
            self.slots.move_slots(source, target)
        for old, new in zip(source, target, strict=True):
            self.running[new] = self.running[old]
        del self.running[after:]
        self.slots.note_used_options(self.running)
        self._prompt_plan = None

    def _keep_kv(self, slot: int) -> None:
        """Copies the KV of an ended draft out of its slot if the request asks for that and there is room.

        An aborted request keeps nothing. Kept KV has at most as many tokens, prefixes included, as all slots together
        can have. What would be more is not kept: that of earlier requests stays, because they are continued first.
        """
        draft = self.running[slot]
        if not draft.request.keep or draft.finish is Finish.ABORT:
            return
        held = [*self.kept.by_id.values(), *(d.kept for d in self.waiting if d.kept is not None)]
        tokens = [*draft.own_prompt, *draft.tokens][:-1]
        num = len(draft.prefix.tokens) + len(tokens)
        if sum(k.num_tokens for k in held) + num > self.num_slots * self.max_context:
            return
        self.kept.add(draft.request.id, draft.prefix, tokens, self.arena.copy_out(slot, len(tokens)))

    def _drop_draft(self, draft: NativeDraft) -> None:
        """Forgets a draft that has ended, and frees its prefix if nothing else uses it."""
        del self.drafts[draft.request.id]
        self.prefixes.remove_user(draft.prefix)
        # The pool may have moved another prefix into the gap.
        self._prompt_plan = None

    def _make_tensor(self, values: list[int]) -> Tensor:
        """Returns `values` as an int64 tensor on the engine's device."""
        return torch.tensor(values, dtype=torch.int64, device=self.arena.device)
