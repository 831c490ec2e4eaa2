"""The native engine on a GPU: continuous batching without a look at the device between windows.

A decode step is one CUDA graph, replayed `window` times. While a window runs, the host takes the one before: it reads
what was drawn, lets those leave who have ended, fills their rows and starts the next. A row that ends inside a window
stays as it is until the host notices, so nothing waits for anybody.
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

from cohort.data.transfer import put
from cohort.engines.base import Abilities, Event, Request, Weights, Work
from cohort.engines.native.cuda.graphs import Graphs, bucket
from cohort.engines.native.cuda.ledger import Ledger, own_pages
from cohort.engines.native.cuda.memory import MOST_PREFILL, Room, divide
from cohort.engines.native.cuda.pages import Arena, PagedPrefix, page_bytes, pages_for
from cohort.engines.native.cuda.prefill import Run, prefill
from cohort.engines.native.cuda.step import State, Variant, prefix_splits, tile_size
from cohort.engines.native.cuda.window import Results, Timer, Window
from cohort.engines.native.draft import Line, NativeDraft
from cohort.engines.native.random import stream_of
from cohort.engines.requests import check_engine, check_request, closed, damaged, not_under_way
from cohort.engines.weights import copy_weights
from cohort.errors import CohortError, ConfigError, ModelError
from cohort.models.decoder import Decoder
from cohort.system.process import settle_objects
from cohort.types import Finish, Sample

log = logging.getLogger(__name__)

GROWTH = 1.1  # a load that is larger by less than this streams through the arena there is
AHEAD = 2  # windows under way at once: one runs while the host takes the other


class GraphEngine:
    """Samples with a decoder whose storage it shares with the learner. Protocol and meaning as `NativeEngine`.

    `memory` bounds the KV arena in bytes (None = what is free). `reserve` is what others (the learner) need between
    rollouts: if KV and that fit together the arena stays, otherwise it is released when nothing is under way, and the
    graphs are captured again afterwards.
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
        check_engine(slots, window, max_context, decoder.config.max_positions)
        self.decoder, self.decode = decoder, tokenizer_decode
        self.num_slots, self.max_context, self.window = slots, max_context, window
        self.memory, self.reserve, self.keep = memory, reserve, True
        self.device = decoder.embed.device
        self.version = 0
        self.work = Work()
        self.drafts: dict[str, NativeDraft] = {}
        self.line = Line()
        self.rows: list[NativeDraft | None] = []  # None = ended, its row not yet taken by another
        self.flight: deque[Window] = deque()
        self.state = State(decoder, slots, window, max_context)
        self.results = Results(self.state.slots)
        self.ledger = Ledger(self.state.tables)
        self.graphs: Graphs | None = None
        self.prefill_tokens = MOST_PREFILL  # in one forward
        self._variant: Variant | None = None  # None = to be planned
        self._events: list[Event] = []
        self._broken = self._closed = False
        self._page_bytes = page_bytes(decoder.config, decoder.embed.dtype)

    # ---- protocol

    def submit(self, request: Request) -> None:
        if self._closed:
            raise closed(self.name)
        check_request(request, self.max_context, self.decoder.config.vocab_size, self.drafts)
        tokens = request.tokens
        # the last token is everybody's own: the step that computes it draws the first new one
        shared = min(request.shared if request.shared > 0 else len(tokens), len(tokens) - 1)
        draft = NativeDraft(
            request=request, stream=stream_of(request.key), prefix=PagedPrefix(tokens=()), own=tokens[shared:]
        )
        need = 1 + pages_for(shared) + own_pages(draft)
        if need > (0 if self.arena is None else self.arena.num) and need > (
            room := self._room(len(tokens)).kv // self._page_bytes
        ):
            raise ConfigError(
                f'request "{request.id}" cannot fit: it needs {need} pages of KV '
                f"({need * self._page_bytes / 2**20:.0f} MiB) and there is room for {room} "
                f"({room * self._page_bytes / 2**20:.0f} MiB); lower max_tokens or free memory."
            )
        draft.prefix = self.ledger.join(tuple(tokens[:shared]))
        self.drafts[request.id] = draft
        self.line.join(draft)

    @property
    def arena(self) -> Arena | None:
        return self.ledger.arena

    @property
    def idle(self) -> bool:
        return not self.drafts and not self._events

    @torch.no_grad()
    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Start windows, take the oldest, report it."""
        with self._device():
            while not self._events:
                self._settle()
                while len(self.flight) < AHEAD and (steps := self._steps()) > 0:
                    self._launch(steps)
                if not self.flight:
                    break
                try:
                    self._take(self.flight.popleft())
                except ModelError:  # everybody goes on from what he has
                    self._return_all()
                    raise
            if not self.drafts and not self.keep:
                self.release()
        events, self._events = self._events, []
        return events

    def abort(self, id: str) -> Sample:
        queued = [e.sample for e in self._events if e.id == id and e.sample is not None]
        draft = self.drafts.get(id)
        if draft is None and not queued:
            raise not_under_way(id)
        self._events = [e for e in self._events if e.id != id]  # nobody hears of it any more
        if draft is None:  # it has ended and nobody was told yet
            queued[0].finish = Finish.ABORT
            return queued[0]
        draft.finish = Finish.ABORT
        if draft in self.rows:
            row = self.rows.index(draft)
            self.state.done[row] = 1
            self._end(row)
        else:
            self.line.leave(draft)
            self._forget(draft)
        if not self.drafts and not self.keep:  # as when the last request ends: nobody may poll an idle engine
            self.release()
        return draft.sample(self.decode)

    @torch.no_grad()
    def load(self, weights: Weights, version: int) -> None:
        with self._device():
            self._return_all()
            if weights.module is not self.decoder:
                copy_weights(weights, self.decoder)
            if self._broken and self.arena is not None:
                self.arena.kv.zero_()  # what is not finite must not be read again, not even with weight zero
        self._broken = False
        self.version = version

    def close(self) -> None:
        self.drafts.clear()
        self.flight.clear()
        self.line, self.rows, self._events = Line(), [], []
        self.ledger.arena = self.graphs = None
        self._closed = True

    def release(self) -> None:
        """Give the KV memory back; what runs is computed again when it goes on, and graphs are captured again."""
        with self._device():
            self._return_all()
            self.ledger.arena = self.graphs = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _return_all(self) -> None:
        """Nobody has a row, nothing is cached. Windows under way are taken first, up to one that is damaged."""
        while self.flight:
            with suppress(ModelError):
                self._take(self.flight.popleft())
        self.line.return_first([d for d in self.rows if d is not None])
        self.rows = []
        self.state.done.fill_(1)  # a row without a draft must not go on writing pages that are somebody else's
        self.ledger.forget()
        self._variant = None

    def _device(self) -> AbstractContextManager[object]:
        """Kernels, events and graphs belong to the current device: make it the decoder's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    # ---- memory

    def _room(self, longest: int) -> Room:
        """What KV and prompts, the longest of so many tokens, may take now."""
        limit = 1 << 60 if self.memory is None else self.memory
        if self.device.type != "cuda":
            return Room(kv=limit, prefill_tokens=MOST_PREFILL)
        free, _ = torch.cuda.mem_get_info(self.device)
        # What others gave back lies in torch's cache, from which it is taken again, but for splinters of blocks in use.
        stats = torch.cuda.memory_stats(self.device)
        cached = stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]
        free += max(0, cached - stats["inactive_split_bytes.all.current"])
        free += 0 if self.arena is None else self.arena.num * self._page_bytes
        width = self.decoder.embed.dtype.itemsize
        room = divide(free, self.decoder.config, width, self.num_slots, longest)
        return replace(room, kv=min(limit, room.kv))

    def _ensure_arena(self) -> None:
        """One arena for what waits, capped by what is free. It only ever grows, and only while nothing runs."""
        waiting = list(self.line)
        own = sorted(map(own_pages, waiting), reverse=True)[: self.num_slots]
        distinct = {id(d.prefix): pages_for(len(d.prefix.tokens)) for d in waiting}
        shared = sorted(distinct.values(), reverse=True)[: self.num_slots]
        wish = 1 + sum(own) + sum(shared)
        have = 0 if self.arena is None else self.arena.num
        least = 1 + max(own) + max(shared)
        longest = max(len(d.request.tokens) for d in waiting)
        if have >= least and have >= min(wish, self._room(longest).kv // self._page_bytes) / GROWTH:
            return
        began = time.perf_counter()
        self.release()
        room = self._room(longest)
        self.prefill_tokens = room.prefill_tokens
        need = min(wish, room.kv // self._page_bytes)
        self.ledger.arena = Arena(self.decoder.config, need, self.decoder.embed.dtype, self.device)
        self.graphs = Graphs(self.decoder, self.state, self.ledger.arena)
        settle_objects()
        self.keep = need * self._page_bytes + self.reserve <= room.kv
        fate = f"released between rollouts, graphs captured again: others need {self.reserve / 2**30:.2f} GiB"
        fate = "kept between rollouts" if self.keep else fate
        what, size = "allocated again" if have else "allocated", need * self._page_bytes / 2**30
        log.info("KV arena %s: %d pages, %.2f GiB in %.2f s, %s", what, need, size, time.perf_counter() - began, fate)

    # ---- entering and leaving

    def _settle(self) -> None:
        """Close the gaps that those who ended have left and let others in, when that pays."""
        live = sum(d is not None for d in self.rows)
        if live == 0:
            self.rows = []
            if self.line and not self.flight:
                self._ensure_arena()
        free = self.num_slots - live
        wanted = bool(self.line) and (live == 0 or free >= -(-self.num_slots // 16)) and self.arena is not None
        enter = wanted and self.ledger.fits(next(iter(self.line)))
        smaller = bucket(live, self.num_slots) < bucket(len(self.rows), self.num_slots)
        if (enter or smaller) and live < len(self.rows):
            self._compact(live)
        if enter:
            self._admit(free)
        elif wanted and live == 0 and not self.flight:
            raise CohortError("the KV arena is too small for the next request alone")  # submit refuses such

    def _compact(self, live: int) -> None:
        target = [row for row in range(live) if self.rows[row] is None]
        source = [row for row in range(live, len(self.rows)) if self.rows[row] is not None]
        self.state.move(source, target)
        self.state.done[live:] = 1
        for old, new in zip(source, target, strict=True):
            self.rows[new] = self.rows[old]
        del self.rows[live:]
        self._variant = None

    def _admit(self, free: int) -> None:
        """Reserve pages for as many as there is room for, compute what they have, give them rows."""
        began = time.perf_counter()
        entering: list[NativeDraft] = []
        while len(entering) < free and self.line and self.ledger.reserve(next(iter(self.line))):
            entering += self.line.take(1)
        try:
            self._compute(entering)
        except BaseException:  # out of memory, say: nobody has entered
            self.line.return_first(entering)
            self.ledger.undo(entering)
            raise
        first = len(self.rows)
        slots, here = self.state.slots, slice(first, first + len(entering))
        slots.place(entering, first)
        cached = [[*d.own, *d.tokens] for d in entering]
        slots.last[here] = put([c[-1] for c in cached], self.device)
        slots.length[here] = put([len(c) - 1 for c in cached], self.device)
        self.rows += entering
        slots.survey([d for d in self.rows if d is not None])
        self.state.tables.set_own(first, [self.ledger.pages(d) for d in entering])
        self.state.done[here] = 0
        for draft in entering:
            draft.begin(self.version)
        self._variant = None
        self.work.prefill_seconds += time.perf_counter() - began

    def _compute(self, entering: list[NativeDraft]) -> None:
        """KV of new prefixes, then of what the drafts have of their own behind them."""
        assert self.arena is not None
        fresh = self.ledger.fresh
        self.state.tables.set_prefixes(fresh)
        runs = [Run(tokens=p.tokens, pages=p.pages) for p in fresh]
        prefill(self.decoder, self.arena, self.state.angles, runs, self.prefill_tokens)
        fresh.clear()
        own = []
        for d in entering:
            assert isinstance(d.prefix, PagedPrefix)
            have = [*d.own, *d.tokens][:-1]
            own.append(Run(tokens=have, pages=self.ledger.pages(d), behind=d.prefix if d.prefix.tokens else None))
        prefill(self.decoder, self.arena, self.state.angles, own, self.prefill_tokens)
        self.work.num_prompt_tokens += sum(len(r.tokens) for r in runs + own)

    def _end(self, row: int) -> None:
        """The row's draft has ended. Its pages may be taken at once: whatever writes them comes after what runs."""
        draft = self.rows[row]
        assert draft is not None
        self.rows[row] = None
        self._forget(draft)

    def _forget(self, draft: NativeDraft) -> None:
        del self.drafts[draft.request.id]
        self.ledger.leave(draft)

    # ---- windows

    def _steps(self) -> int:
        """Steps worth starting: until the last row must have ended by length, a window at most."""
        left = 0
        for draft in self.rows:
            if draft is not None:
                ahead = sum(w.steps for w in self.flight if id(draft) in w.members)
                left = max(left, draft.request.sampling.max_tokens - len(draft.tokens) - ahead)
        return min(left, self.window)

    def _launch(self, steps: int) -> None:
        assert self.graphs is not None
        if self._variant is None:
            self._variant = self._plan()
        replay = self.graphs.get(self._variant)
        timer = Timer(self.device)
        self.state.slots.filled.zero_()
        for _ in range(steps):
            replay()
        timer.stop()
        results = self.results.fetch(len(self.rows))
        timer.copied()
        self.flight.append(Window(rows=list(self.rows), steps=steps, results=results, timer=timer))
        self.work.num_steps += steps

    def _plan(self) -> Variant:
        """Which rows read which prefix together."""
        groups: dict[int, list[int]] = {}
        for row, draft in enumerate(self.rows):
            if draft is not None and draft.prefix.tokens:
                groups.setdefault(draft.prefix.entry, []).append(row)
        tile = tile_size(self.decoder.config.queries_per_kv, max(map(len, groups.values()), default=1))
        each = tile // self.decoder.config.queries_per_kv
        longest = max((len(d.prefix.tokens) for d in self.rows if d is not None), default=0)
        tiles = [(entry, rows[i : i + each]) for entry, rows in groups.items() for i in range(0, len(rows), each)]
        rows = bucket(len(self.rows), self.num_slots)
        num = min(rows, max(1, 1 << (len(tiles) - 1).bit_length())) if tiles else 1
        entries = [entry for entry, _ in tiles] + [-1] * (num - len(tiles))
        members = [m + [-1] * (each - len(m)) for _, m in tiles] + [[-1] * each] * (num - len(tiles))
        self.state.tile_prefix[:num] = put(entries, self.device, torch.int32)
        self.state.tile_rows[: num * each] = put(members, self.device, torch.int32).flatten()
        s = self.state.slots
        return Variant(
            rows=rows,
            tile=tile,
            tiles=num,
            prefix_splits=prefix_splits(num, self.decoder.config.num_kv_heads, longest),
            truncated=s.truncated,
            sorted=s.sorted,
            greedy=s.greedy,
            scaled=s.scaled and s.truncated,
        )

    def _take(self, window: Window) -> None:
        """Read a window's results into the drafts; report them; those who ended leave."""
        self.work.decode_seconds += window.timer.wait()
        filled, tokens, logprobs, kept = self.results.read(window)
        where = {id(d): row for row, d in enumerate(self.rows) if d is not None}
        for row, draft in enumerate(window.rows):
            if draft is None or draft.finish is not None:
                continue
            num = filled[row]
            if not all(map(math.isfinite, logprobs[row][:num])):
                self._broken = True
                self.flight.clear()  # what later windows drew would leave a hole in those not read here
                raise damaged(self.version)
            event = draft.hear(tokens[row][:num], logprobs[row][:num], kept[row][:num], self.decode)
            self.work.num_drawn += num
            self._events.append(event)
            if event.sample is not None:
                if draft.cut >= 0:  # by a stop string, of which the device knows nothing
                    self.state.done[where[id(draft)]] = 1
                self._end(where[id(draft)])
