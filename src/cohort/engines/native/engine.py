"""The native engine: continuous batching on the learner's own weights.

Running drafts fill the slots 0 .. n - 1. A step computes one token for all of them; who ends leaves at once,
the last slot moves into the gap, and drafts that wait take the free slots. A prompt is computed and stored
once a group. Nothing looks at single samples in Python at every token: they are read back in bulk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from cohort.engines.base import Abilities, Event, Request, Weights, Work
from cohort.engines.native.attention import Prompts, decode_attend, extend_attend, plan, prefill_attend
from cohort.engines.native.draft import Line, NativeDraft
from cohort.engines.native.kv import Arena, Prefix, Prefixes, length_class
from cohort.engines.native.packed import PackedLinears
from cohort.engines.native.random import stream_of
from cohort.engines.native.sampler import draw
from cohort.engines.native.slots import Slots
from cohort.engines.requests import check_engine, check_request, closed, damaged, not_under_way
from cohort.engines.weights import copy_weights
from cohort.models.decoder import Attend, Decoder
from cohort.models.functions import wide_product
from cohort.types import Finish, Sample

PREFILL_TOKENS = 2048  # most prompt tokens in one forward (a longer prompt goes alone)
EXTEND_TOKENS = 256  # a slot's own tokens computed at once; with EXTEND_ROWS it bounds the scores in memory
EXTEND_ROWS = 32
FIRST_ROOM = 64  # own tokens a slot has room for at first
LOGITS = 1 << 24  # most logits in memory at once


class NativeEngine:
    """Samples with a decoder whose storage it shares with the learner.

    `tokenizer_decode` makes text of ids, for `Sample.text` and stop strings only. `max_context` bounds prompt
    plus completion. `weights` = "packed" samples from copies laid out for the processor, "fp16" from half as
    many bytes: faster still, not exact. `window` is the number of steps between reports: a server wants 1,
    training any number.
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
        check_engine(slots, window, max_context, decoder.config.max_positions)
        dtype, device = decoder.embed.dtype, decoder.embed.device
        self.decoder, self.decode = decoder, tokenizer_decode
        self.num_slots, self.max_context, self.window = slots, max_context, window
        self.packed = None if weights == "shared" else PackedLinears(decoder, weights, slots)
        self.version = 0
        self.work = Work()
        self.drafts: dict[str, NativeDraft] = {}  # all that are not ended, by request id
        self.line = Line()
        self.running: list[NativeDraft] = []  # by slot
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.slots = Slots(slots, window + 1, wide, device)
        self.arena = Arena(decoder.config, dtype, device)
        self.prefixes = Prefixes(decoder.config, dtype, device)
        self._prompts: Prompts | None = None  # how `running` read their prompts; None = to be planned
        self._events: list[Event] = []
        self._broken = False
        self._closed = False

    # ---- protocol

    def submit(self, request: Request) -> None:
        if self._closed:
            raise closed(self.name)
        check_request(request, self.max_context, self.decoder.config.vocab_size, self.drafts)
        shared = request.shared if request.shared > 0 else len(request.tokens)
        draft = NativeDraft(
            request=request,
            stream=stream_of(request.key),
            prefix=self.prefixes.take(tuple(request.tokens[:shared])),
            own=list(request.tokens[shared:]),
        )
        self.drafts[request.id] = draft
        self.line.join(draft)

    @property
    def idle(self) -> bool:
        return not self.drafts and not self._events

    @torch.no_grad()
    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Up to `window` steps. Reports every running request's new tokens and what ended."""
        for _ in range(self.window):
            self._admit()
            if not self.running:
                break
            self._step()
        self._leave(self._read(range(len(self.running))))
        if not self.drafts:
            self.release()  # nothing under way, nothing held: the learner may need the memory now
        events, self._events = self._events, []
        return events

    def abort(self, id: str) -> Sample:
        draft = self.drafts.get(id)
        if draft is None:
            raise not_under_way(id)
        draft.finish = Finish.ABORT
        if draft in self.running:
            self._leave([self.running.index(draft)])
        else:
            self.line.leave(draft)
            self._forget(draft)
        if not self.drafts:
            self.release()  # as when the last request ends: nobody may poll an idle engine
        return draft.sample(self.decode)

    def load(self, weights: Weights, version: int) -> None:
        if weights.module is not self.decoder:
            copy_weights(weights, self.decoder)
        if self.packed is not None:
            self.packed.drop()
        if self._broken:  # what was computed with damaged weights must not be read again, not even with weight zero
            self.release()
        self.version = version
        self.line.return_first(self.running)
        self.running = []
        self.prefixes.forget()
        self._prompts = None
        self._broken = False

    def close(self) -> None:
        # Not by `abort`: whoever was interrupted in the middle of a step must be able to close.
        self.drafts.clear()
        self.line, self.running, self._events = Line(), [], []
        self.release()
        self._closed = True

    def release(self) -> None:
        """Give the cache's memory back; what runs is computed again when it goes on."""
        self.line.return_first(self.running)
        self.running = []
        self.prefixes.release()
        self.arena.release()
        if self.packed is not None:
            self.packed.drop()
        self._prompts = None

    # ---- entering

    def _admit(self) -> None:
        """Fill free slots, draw the first token of those who enter."""
        free = self.num_slots - len(self.running)
        if not self.line or (self.running and free < -(-self.num_slots // 16)):  # a prefill of few prompts is slow
            return
        entering = sorted(self.line.take(free), key=lambda d: d.num_cached)
        begin = time.perf_counter()
        missing = {id(d.prefix): d.prefix for d in entering if d.prefix.pool is None}
        self._prefill(sorted(missing.values(), key=lambda p: len(p.tokens)))
        first = len(self.running)
        self.running += entering
        self._prompts = None
        self.slots.place(entering, first)
        self.slots.survey(self.running)
        for draft in entering:
            draft.begin(self.version)
        hidden = self._enter(entering, first)
        self.work.prefill_seconds += time.perf_counter() - begin
        self._draw(first, hidden)

    def _prefill(self, prefixes: list[Prefix]) -> None:
        """Compute prefixes, sorted by length, several in one forward."""
        while prefixes:
            num, total = 0, 0
            while num < len(prefixes) and (num == 0 or total + len(prefixes[num].tokens) <= PREFILL_TOKENS):
                total += len(prefixes[num].tokens)
                num += 1
            now, prefixes = prefixes[:num], prefixes[num:]
            batches: dict[int, list[Prefix]] = {}
            for prefix in now:
                self.prefixes.place(prefix)
                batches.setdefault(length_class(len(prefix.tokens)), []).append(prefix)
            tokens = self._tensor([t for p in now for t in p.tokens])
            positions = self._tensor([i for p in now for i in range(len(p.tokens))])
            hidden = self._forward(tokens, positions, prefill_attend(list(batches.values())))
            end = -1
            for prefix in now:
                end += len(prefix.tokens)
                prefix.hidden = hidden[end].clone()
            self.work.num_prompt_tokens += total

    def _enter(self, entering: list[NativeDraft], first: int) -> Tensor:
        """Hidden states to draw from, [n, d]: after the prefix, or after own tokens where there are some.

        `entering` is sorted by the number of own tokens, so those that still have some are the last slots.
        """
        lasts = [d.prefix.hidden for d in entering]
        assert all(h is not None for h in lasts)
        hidden = torch.stack([h for h in lasts if h is not None])
        for low in range(0, len(entering), EXTEND_ROWS):
            part = entering[low : low + EXTEND_ROWS]
            longest = part[-1].num_cached
            self.arena.reserve(len(self.running), max(longest + 1, FIRST_ROOM))
            for have in range(0, longest, EXTEND_TOKENS):
                begin = next(i for i, d in enumerate(part) if d.num_cached > have)
                self._extend(part[begin:], first + low + begin, have, hidden[low + begin : low + len(part)])
        return hidden

    def _extend(self, drafts: list[NativeDraft], first: int, have: int, hidden: Tensor) -> None:
        """Compute own tokens from `have` on (EXTEND_TOKENS at most) of the slots from `first` on."""
        todo = [(d.own + d.tokens)[have : have + EXTEND_TOKENS] for d in drafts]
        counts = [len(t) for t in todo]
        prompts = plan([d.prefix for d in drafts], self.arena.dtype, self.arena.device)
        starts = [len(d.prefix.tokens) + have for d in drafts]
        tokens = self._tensor([t for own in todo for t in own])
        positions = self._tensor([s + i for s, n in zip(starts, counts, strict=True) for i in range(n)])
        states = self._forward(tokens, positions, extend_attend(self.arena, prompts, first, have, counts))
        ends = self._tensor(counts).cumsum(0) - 1
        hidden.copy_(states.index_select(0, ends))
        self.slots.length[first : first + len(drafts)] += self._tensor(counts)
        self.work.num_prompt_tokens += len(tokens)

    # ---- a step

    def _step(self) -> None:
        """One token for every running draft."""
        begin = time.perf_counter()
        n, s = len(self.running), self.slots
        if self._prompts is None:
            self._prompts = plan([d.prefix for d in self.running], self.arena.dtype, self.arena.device)
        longest = int(s.length[:n].max())
        self.arena.reserve(n, max(longest + 1, FIRST_ROOM))
        attend = decode_attend(self.arena, self._prompts, s.length[:n], longest)
        hidden = self._forward(s.last[:n], s.base[:n] + s.length[:n], attend)
        s.length[:n] += 1
        self.work.num_steps += 1
        self.work.decode_seconds += time.perf_counter() - begin
        self._draw(0, hidden)

    def _draw(self, first: int, hidden: Tensor) -> None:
        """Draw a token for the slots from `first` on; who is done leaves."""
        begin = time.perf_counter()
        chunk = max(1, LOGITS // self.decoder.config.vocab_size)
        done, finite = [], True
        for low in range(0, len(hidden), chunk):
            part = hidden[low : low + chunk]
            here = slice(first + low, first + low + len(part))
            with self._products():
                logits = wide_product(part, self.decoder.head_weight)
            drawn = draw(logits, self.slots.settings(here), self.slots.uniforms(here))
            finite = finite and bool(drawn.logprobs.isfinite().all())
            done.append(self.slots.record(here, drawn))
        self.work.num_drawn += len(hidden)
        if not finite:
            self._broken = True
            raise damaged(self.version)
        slots = (first + torch.cat(done).nonzero()[:, 0]).tolist()
        if slots:
            self._leave(self._read(slots))
        self.work.draw_seconds += time.perf_counter() - begin

    def _forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        with self._products():
            hidden: Tensor = self.decoder(tokens, positions, attend)
        return hidden

    def _products(self) -> AbstractContextManager[None]:
        return nullcontext() if self.packed is None else self.packed.used()

    # ---- leaving

    def _read(self, slots: Sequence[int]) -> list[int]:
        """Take the windows of these slots into their drafts, report them, tell which slots have ended."""
        ended: list[int] = []
        if not slots:
            return ended
        for slot, drawn in zip(slots, self.slots.read_back(slots), strict=True):
            draft = self.running[slot]
            self._events.append(draft.hear(*drawn, self.decode))
            if draft.finish is not None:
                ended.append(slot)
        return ended

    def _leave(self, slots: Sequence[int]) -> None:
        """Free these slots: the last running drafts move into the gaps."""
        if not slots:
            return
        gone, before = set(slots), len(self.running)
        for slot in slots:
            self._forget(self.running[slot])
        after = before - len(gone)
        target = sorted(slot for slot in gone if slot < after)
        source = [slot for slot in range(after, before) if slot not in gone]
        if source:
            self.arena.move(source, target, int(self.slots.length[source].max()))
            self.slots.move(source, target)
        for old, new in zip(source, target, strict=True):
            self.running[new] = self.running[old]
        del self.running[after:]
        self.slots.survey(self.running)
        self._prompts = None

    def _forget(self, draft: NativeDraft) -> None:
        del self.drafts[draft.request.id]
        self.prefixes.leave(draft.prefix)
        self._prompts = None  # the pool may have moved a prefix

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.arena.device)
