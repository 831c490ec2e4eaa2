"""The native engine on a GPU: continuous batching in which the host never waits for a single step.

A decode step is one CUDA graph, replayed `window` times. While one window runs, the host handles the window before:
it reads the drawn tokens, removes the drafts that ended, fills their rows and launches the next window. A row that ends
inside a window does not change until the host notices it, so neither side waits for the other.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace

import torch

from cohort.data.transfer import copy_to_device
from cohort.engines.base import Abilities, Event, Request, Weights, WorkCounters
from cohort.engines.native.cuda.graphs import GraphCache, round_to_bucket
from cohort.engines.native.cuda.ledger import PageLedger, count_arena_pages, count_own_pages
from cohort.engines.native.cuda.memory import MAX_PREFILL_TOKENS, MemorySplit, divide_memory, measure_usable_bytes
from cohort.engines.native.cuda.pages import PageArena, PagedPrefix, count_page_bytes, count_pages
from cohort.engines.native.cuda.prefill import TokenRun, prefill
from cohort.engines.native.cuda.step import DecodeState, StepVariant
from cohort.engines.native.cuda.tiles import plan_step
from cohort.engines.native.cuda.window import HostCopies, Window, WindowTimer
from cohort.engines.native.draft import NativeDraft, WaitingDrafts
from cohort.engines.native.random import derive_random_stream
from cohort.engines.requests import (
    check_engine_limits,
    check_request,
    closed_engine_error,
    damaged_weights_error,
    unknown_request_error,
)
from cohort.engines.weights import copy_weights
from cohort.errors import CohortError, ConfigError, ModelError
from cohort.models.decoder import Decoder
from cohort.system.process import freeze_objects
from cohort.types import Finish, Sample

log = logging.getLogger(__name__)

MIN_GROWTH = 1.1  # the arena is replaced only by one that is larger by this factor
MAX_WINDOWS = 2  # windows under way at once: one runs while the host handles the other


class GraphEngine:
    """Samples with a decoder whose storage it shares with the learner. Same protocol and meaning as `NativeEngine`.

    `memory` bounds the KV arena in bytes (None = only free memory does). `reserve` is the bytes that others, such as
    the learner, need between rollouts. If KV and `reserve` fit together, the arena is kept. Otherwise it is released
    when no request is under way, and the graphs are captured again afterwards.
    """

    name = "native"
    abilities = Abilities()

    def __init__(
        self,
        decoder: Decoder,
        tokenizer_decode: Callable[[list[int]], str],
        slots: int,
        max_context: int,
        window: int = 16,
        memory: int | None = None,
        reserve: int = 0,
    ) -> None:
        check_engine_limits(slots, window, max_context, decoder.config.max_positions)
        self.decoder, self.decode = decoder, tokenizer_decode
        self.num_slots = slots
        self.max_context = max_context
        self.window = window
        self.memory, self.reserve = memory, reserve
        self.keep_arena = True  # whether the arena stays allocated while no request is under way
        self.device = decoder.embed.device
        self.version = 0
        self.work = WorkCounters()
        self.drafts: dict[str, NativeDraft] = {}  # all drafts that have not ended, by request id
        self.waiting = WaitingDrafts()
        self.rows: list[NativeDraft | None] = []  # None = the draft has ended and its row is still empty
        self.windows: deque[Window] = deque()  # launched and not read yet, oldest first
        self.state = DecodeState(decoder, slots, window, max_context)
        self.results = HostCopies(self.state.slots)
        self.ledger = PageLedger(self.state.tables)
        self.graphs: GraphCache | None = None
        self.prefill_tokens = MAX_PREFILL_TOKENS  # most tokens in one forward of a prefill
        self._variant: StepVariant | None = None  # the step for the present rows; None = to be planned
        self._events: list[Event] = []
        self._has_damaged_kv = self._closed = False
        self._page_bytes = count_page_bytes(decoder.config, decoder.embed.dtype)

    # ---- protocol

    def submit(self, request: Request) -> None:
        """Queues a request. Requests with the same shared tokens store their KV once, in one prefix.

        Raises ConfigError for a request that can never be served, whose id is under way, or whose KV would not fit into
        the GPU's memory (or `memory`) even alone; EngineError after `close`.
        """
        if self._closed:
            raise closed_engine_error(self.name)
        check_request(request, self.max_context, self.decoder.config.vocab_size, self.drafts)
        tokens, kept = request.tokens, self.ledger.take_kept(request)
        # The last prompt token always belongs to the draft itself: the step that computes it draws the first new token.
        shared = min(request.shared if request.shared > 0 else len(tokens), len(tokens) - 1)
        # Kept KV brings its prefix along, and its use of it.
        shared = shared if kept is None else len(kept.prefix.tokens)
        draft = NativeDraft(
            request=request,
            random_stream=derive_random_stream(request.key),
            prefix=PagedPrefix(tokens=()),
            own_prompt=tokens[shared:],
            kept=kept,
        )
        # One page more, for page 0. The free memory is measured only if the present arena is too small.
        need = 1 + count_pages(shared) + count_own_pages(draft)
        if need > (0 if self.arena is None else self.arena.num_pages) and need > (
            room := self._measure_room(len(tokens)).kv_bytes // self._page_bytes
        ):
            if kept is not None:
                self.ledger.kept[request.continues] = kept
            raise ConfigError(
                f'request "{request.id}" cannot fit: its keys and values need {need} pages of memory '
                f"({need * self._page_bytes / 2**20:.0f} MiB), and there is room for {room} "
                f"({room * self._page_bytes / 2**20:.0f} MiB). Lower max_tokens "
                "(cohort train: --sampling.max_tokens; cohort eval: --max-tokens), or end other programs on the GPU."
            )
        draft.prefix = self.ledger.add_user(tuple(tokens[:shared])) if kept is None else kept.prefix
        self.drafts[request.id] = draft
        self.waiting.add(draft)
        # The id names another request from now on.
        self.forget(request.id)

    @property
    def arena(self) -> PageArena | None:
        """The KV memory; None before the first use and after `release` or `close`."""
        return self.ledger.arena

    @property
    def idle(self) -> bool:
        """Whether no request is under way and no event waits to be reported."""
        return not self.drafts and not self._events

    @torch.no_grad()
    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Queues windows (runs of decode steps) on the device, waits for the oldest one and returns its events.

        Gives rows to waiting requests if that pays. Up to MAX_WINDOWS windows are queued before the wait, so the device
        works on while the host handles the events. Returns [] only if no request is left. `timeout` is ignored, because
        this process does the work. Raises ModelError if a log-probability is not finite (all requests then wait again),
        CohortError if the next request alone has no room.
        """
        with self._use_device():
            while not self._events:
                self._compact_and_admit()
                while len(self.windows) < MAX_WINDOWS and (steps := self._count_steps()) > 0:
                    self._launch_window(steps)
                if not self.windows:
                    break
                try:
                    self._read_window(self.windows.popleft())
                except ModelError:
                    # All drafts continue from the tokens they have, once good weights are loaded.
                    self._requeue_all()
                    raise
            self._release_if_unused()
        events, self._events = self._events, []
        return events

    def abort(self, id: str) -> Sample:
        """Stops a request and returns its sample with the tokens read so far and finish = abort.

        The request may be running or waiting, or have ended without being reported. Its events that were not reported
        are dropped. Raises CohortError for an unknown id.
        """
        queued = [e.sample for e in self._events if e.id == id and e.sample is not None]
        draft = self.drafts.get(id)
        if draft is None and not queued:
            raise unknown_request_error(id)
        self._events = [e for e in self._events if e.id != id]
        # The request has ended, but its last event was not reported yet: for the caller it was still under way.
        if draft is None:
            self.forget(id)
            queued[0].finish = Finish.ABORT
            return queued[0]
        draft.finish = Finish.ABORT
        if draft in self.rows:
            row = self.rows.index(draft)
            self.state.done[row] = 1
            self._end_row(row)
        else:
            self.waiting.remove(draft)
            self._drop_draft(draft)
        # `poll` would release the memory too, but a caller may never poll an idle engine.
        self._release_if_unused()
        return draft.to_sample(self.decode)

    def forget(self, id: str) -> None:
        """Drops the KV that is kept for an ended request, if there is any.

        If it was the last, no request is under way and the arena is not kept, frees memory like `release`.
        """
        if id in self.ledger.kept:
            self.ledger.remove_kept(id)
            self._release_if_unused()

    @torch.no_grad()
    def load(self, weights: Weights, version: int) -> None:
        """Samples from `weights` from now on, as `version`. Weights of another decoder are copied into this one.

        Windows under way are read first; the next `poll` reports them. All KV, kept or in use, is dropped: running
        requests wait again until it is recomputed.
        """
        with self._use_device():
            self._requeue_all()
            if weights.module is not self.decoder:
                copy_weights(weights, self.decoder)
            if self._has_damaged_kv and self.arena is not None:
                # KV that is not finite must not be read again, not even with attention weight zero.
                self.arena.kv.zero_()
        self._release_if_unused()
        self._has_damaged_kv = False
        self.version = version

    def close(self) -> None:
        """Drops every request and frees the KV memory and the graphs. A later `submit` raises EngineError."""
        self.drafts.clear()
        self.windows.clear()
        self.waiting = WaitingDrafts()
        self.rows = []
        self._events = []
        self.ledger.kept.clear()
        self.ledger.arena = self.graphs = None
        self._closed = True

    def release(self) -> None:
        """Frees the KV memory and the graphs, after reading the windows under way. Running requests wait again."""
        with self._use_device():
            self._requeue_all()
            self.ledger.arena = self.graphs = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _release_if_unused(self) -> None:
        """Frees memory like `release` if no request is under way, no KV is kept and others need the memory now."""
        if not self.drafts and not self.ledger.kept and not self.keep_arena:
            self.release()

    def _requeue_all(self) -> None:
        """Reads the windows under way, puts running requests back into the queue first, and frees all KV pages.

        All rows become empty and done. A ModelError while reading is suppressed; the later windows are then dropped.
        """
        while self.windows:
            # Damaged weights end the reading: `_read_window` then discards the later windows.
            with suppress(ModelError):
                self._read_window(self.windows.popleft())
        self.waiting.put_back_first([d for d in self.rows if d is not None])
        self.rows = []
        # A row without a draft must not write to pages that by then belong to another draft.
        self.state.done.fill_(1)
        self.ledger.free_all()
        self._variant = None

    def _use_device(self) -> AbstractContextManager[object]:
        """Returns a context that makes the decoder's device the current CUDA device. On a CPU it does nothing."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    # ---- memory

    def _measure_room(self, longest: int) -> MemorySplit:
        """Returns how many bytes KV may take now, and how many tokens a prefill may compute at once.

        KV gets at most `self.memory`; on a CPU that is the only limit. The memory of the present arena counts as free.
        `longest` is the number of tokens of the longest prompt.
        """
        limit = 1 << 60 if self.memory is None else self.memory
        if self.device.type != "cuda":
            return MemorySplit(kv_bytes=limit, prefill_tokens=MAX_PREFILL_TOKENS)
        # The present arena would be freed before a new one is allocated.
        present = 0 if self.arena is None else self.arena.num_pages * self._page_bytes
        free = measure_usable_bytes(self.device) + present
        width = self.decoder.embed.dtype.itemsize
        room = divide_memory(free, self.decoder.config, width, self.num_slots, longest)
        return replace(room, kv_bytes=min(limit, room.kv_bytes))

    def _ensure_arena(self) -> None:
        """Allocates KV memory for the waiting requests, as much as they need and the free memory allows.

        Keeps the present arena if it has room for each waiting request alone and is large enough or could hardly grow.
        A new one may still be too small. It takes over what is computed for conversations if there is memory for both
        arenas; otherwise that is computed again. Must be called only while no draft runs and some wait.
        """
        waiting = list(self.waiting)
        wanted, least = count_arena_pages(waiting, self.num_slots)
        have = 0 if self.arena is None else self.arena.num_pages
        longest = max(len(d.request.tokens) for d in waiting)
        room = self._measure_room(longest)
        if have >= least and have >= min(wanted, room.kv_bytes // self._page_bytes) / MIN_GROWTH:
            return
        began = time.perf_counter()
        need = min(wanted, room.kv_bytes // self._page_bytes)
        old = self.arena if self.ledger.idle_kept and (have + need) * self._page_bytes <= room.kv_bytes else None
        if old is None:
            self.release()
            room = self._measure_room(longest)
            need = min(wanted, room.kv_bytes // self._page_bytes)
        self.prefill_tokens = room.prefill_tokens
        self.ledger.arena = PageArena(self.decoder.config, need, self.decoder.embed.dtype, self.device)
        if old is not None:
            self.ledger.arena.take_over(old)
        self.graphs = GraphCache(self.decoder, self.state, self.ledger.arena)
        # A full pass of the garbage collector would take so long that the device runs out of queued work.
        freeze_objects()
        self.keep_arena = need * self._page_bytes + self.reserve <= room.kv_bytes
        fate = f"released between rollouts, graphs captured again: others need {self.reserve / 2**30:.2f} GiB"
        fate = "kept between rollouts" if self.keep_arena else fate
        what, size = "allocated again" if have else "allocated", need * self._page_bytes / 2**30
        log.info("KV arena %s: %d pages, %.2f GiB in %.2f s, %s", what, need, size, time.perf_counter() - began, fate)

    # ---- entering and leaving

    def _compact_and_admit(self) -> None:
        """Closes the gaps between rows and gives rows to waiting requests, if that pays.

        Allocates the KV arena first if nothing runs. Raises CohortError if it is too small for the next request alone.
        """
        live = sum(d is not None for d in self.rows)
        if live == 0:
            self.rows = []
            if self.waiting and not self.windows:
                self._ensure_arena()
        free = self.num_slots - live
        # A prefill of few prompts is slow: while drafts run, wait until a sixteenth of the slots is free.
        wanted = bool(self.waiting) and (live == 0 or free >= -(-self.num_slots // 16)) and self.arena is not None
        enter = wanted and self.ledger.has_room_for(next(iter(self.waiting)))
        # Without new drafts, compacting pays only if a smaller graph then serves the rows.
        smaller = round_to_bucket(live, self.num_slots) < round_to_bucket(len(self.rows), self.num_slots)
        if (enter or smaller) and live < len(self.rows):
            self._close_gaps(live)
        if enter:
            self._admit_waiting(free)
        elif wanted and live == 0 and not self.windows:
            # `submit` refuses such requests, but less memory may be free now than then.
            raise CohortError(
                "the KV arena is too small for the next request alone; lower max_tokens or free GPU memory."
            )

    def _close_gaps(self, live: int) -> None:
        """Moves drafts from the last rows into empty ones, so that the `live` running drafts fill the first rows."""
        target = [row for row in range(live) if self.rows[row] is None]
        source = [row for row in range(live, len(self.rows)) if self.rows[row] is not None]
        self.state.move_rows(source, target)
        self.state.done[live:] = 1
        for old, new in zip(source, target, strict=True):
            self.rows[new] = self.rows[old]
        del self.rows[live:]
        self._variant = None

    def _admit_waiting(self, free: int) -> None:
        """Gives rows to up to `free` waiting drafts, as far as KV pages suffice, and computes their known tokens.

        The last known token of each is left to the first step. If computing raises, these drafts wait again as before.
        """
        began = time.perf_counter()
        entering: list[NativeDraft] = []
        while len(entering) < free and self.waiting and self.ledger.reserve(next(iter(self.waiting))):
            entering += self.waiting.pop_next(1)
        try:
            self._prefill_drafts(entering)
        except BaseException:
            # For example out of memory: undo everything, so that no draft has entered.
            self.waiting.put_back_first(entering)
            self.ledger.cancel_reservations(entering)
            raise
        first = len(self.rows)
        slots, here = self.state.slots, slice(first, first + len(entering))
        slots.place_drafts(entering, first)
        # The last own token is not in the cache: the first step computes it.
        cached = [[*d.own_prompt, *d.tokens] for d in entering]
        slots.last_token[here] = copy_to_device([c[-1] for c in cached], self.device)
        slots.own_length[here] = copy_to_device([len(c) - 1 for c in cached], self.device)
        self.rows += entering
        slots.note_used_options([d for d in self.rows if d is not None])
        self.state.tables.set_own_pages(first, [self.ledger.get_pages(d) for d in entering])
        self.state.done[here] = 0
        for draft in entering:
            draft.set_version(self.version)
        self._variant = None
        self.work.prefill_seconds += time.perf_counter() - began

    def _prefill_drafts(self, entering: list[NativeDraft]) -> None:
        """Computes the KV of `ledger.uncomputed`, then empties it, and of the drafts' own tokens but each last one.

        Own tokens whose KV was kept by the request before are left out.
        """
        assert self.arena is not None
        uncomputed = self.ledger.uncomputed
        self.state.tables.set_prefix_pages(uncomputed)
        runs = [TokenRun(tokens=p.tokens, pages=p.pages) for p in uncomputed]
        prefill(self.decoder, self.arena, self.state.angles, runs, self.prefill_tokens)
        uncomputed.clear()
        own = []
        for d in entering:
            assert isinstance(d.prefix, PagedPrefix)
            known = [*d.own_prompt, *d.tokens][d.num_kept : -1]
            prefix = d.prefix if d.prefix.tokens else None
            pages = self.ledger.get_pages(d)
            own.append(TokenRun(tokens=known, pages=pages, prefix=prefix, num_cached=d.num_kept))
        prefill(self.decoder, self.arena, self.state.angles, own, self.prefill_tokens)
        self.work.num_prompt_tokens += sum(len(r.tokens) for r in runs + own)
        for d in entering:
            d.kept = None

    def _end_row(self, row: int) -> None:
        """Empties a row whose request has ended, and frees its pages, unless their KV is to be kept.

        Other requests may take the pages at once: what they write is queued behind the windows that still run.
        """
        draft = self.rows[row]
        assert draft is not None
        self.rows[row] = None
        self._drop_draft(draft)

    def _drop_draft(self, draft: NativeDraft) -> None:
        """Forgets a draft that has ended. Frees its own pages, and its prefix if nothing else uses it.

        The KV of a running draft that was not aborted is kept if the request asks for that. Steps that are still queued
        for its row write only behind the tokens that it has.
        """
        del self.drafts[draft.request.id]
        if draft.request.keep and draft.finish is not Finish.ABORT:
            self.ledger.keep_draft(draft)
        else:
            self.ledger.remove_draft(draft)

    # ---- windows

    def _count_steps(self) -> int:
        """Returns the number of steps of the next window, at most `self.window`; 0 = no step is needed.

        It is the most tokens that some running request may still draw after the windows under way.
        """
        remaining = 0
        for draft in self.rows:
            if draft is not None:
                ahead = sum(w.steps for w in self.windows if id(draft) in w.draft_ids)
                remaining = max(remaining, draft.request.sampling.max_tokens - len(draft.tokens) - ahead)
        return min(remaining, self.window)

    def _launch_window(self, steps: int) -> None:
        """Queues `steps` decode steps and the copy of their results to the host. Does not wait for them.

        The new Window is appended to `windows`, for `_read_window`.
        """
        assert self.graphs is not None
        if self._variant is None:
            self._variant = plan_step(self.rows, self.state, self.decoder.config, self.num_slots)
        replay = self.graphs.get_step(self._variant)
        timer = WindowTimer(self.device)
        self.state.slots.num_filled.zero_()
        for _ in range(steps):
            replay()
        timer.mark_work_queued()
        results = self.results.start_copy(len(self.rows))
        timer.mark_copies_queued()
        self.windows.append(Window(rows=list(self.rows), steps=steps, results=results, timer=timer))
        self.work.num_steps += steps

    def _read_window(self, window: Window) -> None:
        """Waits for a window, adds its tokens to the drafts and queues the events. Drafts that end leave their rows.

        The caller has removed it from `windows`. If a log-probability is not finite, drops the later windows and raises
        ModelError; drafts in earlier rows have got their tokens by then.
        """
        self.work.decode_seconds += window.timer.wait_for_results()
        filled, tokens, logprobs, kept = self.results.read(window)
        row_of = {id(d): row for row, d in enumerate(self.rows) if d is not None}  # rows may have moved since
        for row, draft in enumerate(window.rows):
            # The draft has ended in an earlier window, or was aborted.
            if draft is None or draft.finish is not None:
                continue
            num = filled[row]
            if not all(map(math.isfinite, logprobs[row][:num])):
                self._has_damaged_kv = True
                # Drafts not read here would have a hole if tokens of later windows were added to them.
                self.windows.clear()
                raise damaged_weights_error(self.version)
            event = draft.add_and_report(tokens[row][:num], logprobs[row][:num], kept[row][:num], self.decode)
            self.work.num_drawn += num
            self._events.append(event)
            if event.sample is not None:
                # The device knows nothing of stop strings, so it must be told that the row is done.
                if draft.stop_offset >= 0:
                    self.state.done[row_of[id(draft)]] = 1
                self._end_row(row_of[id(draft)])
