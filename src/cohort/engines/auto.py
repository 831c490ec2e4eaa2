"""The engine of models outside the native family: batches of requests, the model's own cache.

Rows of a batch are padded on the left, so that their next tokens stand in one column and distances between tokens are
what they are alone. Who ends leaves at once: the cache is copied without its row, which is what the cache itself does
at every token. A batch is begun when the one before has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.engines.base import Abilities, Event, Request, Weights, Work
from cohort.engines.draft import Draft
from cohort.engines.native.engine import LOGITS
from cohort.engines.native.random import stream_of
from cohort.engines.native.sampler import draw
from cohort.engines.native.slots import Slots
from cohort.engines.requests import check_engine, check_request, closed, damaged, not_under_way
from cohort.errors import ConfigError, ModelError
from cohort.models.auto import AutoDecoder
from cohort.models.functions import wide_product
from cohort.types import Finish, Sample

PREFILL_TOKENS = 1 << 15  # most prompt tokens in one forward, padding included (a longer prompt goes alone)


class AutoEngine:
    """Samples with the decoder that the learner trains. Protocol, random numbers and meaning as `NativeEngine`."""

    name = "transformers"
    abilities = Abilities()

    def __init__(
        self,
        decoder: AutoDecoder,
        tokenizer_decode: Callable[[list[int]], str],
        *,
        slots: int,
        max_context: int,
        window: int = 8,
    ) -> None:
        check_engine(slots, window, max_context, decoder.config.max_positions)
        self.decoder, self.decode = decoder, tokenizer_decode
        self.num_slots, self.max_context, self.window = slots, max_context, window
        self.device = decoder.embed.device
        self.version = 0
        self.drafts: dict[str, Draft] = {}  # all that are not ended, by request id
        self.waiting: list[Draft] = []
        self.running: list[Draft] = []  # by row
        wide = torch.float64 if decoder.embed.dtype == torch.float64 else torch.float32
        self.slots = Slots(slots, window, wide, self.device)
        self.cache: Any = None  # what the model remembers of the rows
        self.mask = torch.zeros(0, 0, dtype=torch.long, device=self.device)  # [rows, columns of the cache], 0 = padding
        self._events: list[Event] = []
        self._closed = False
        self.work = Work()

    # ---- protocol

    def submit(self, request: Request) -> None:
        if self._closed:
            raise closed(self.name)
        check_request(request, self.max_context, self.decoder.config.vocab_size, self.drafts)
        self.drafts[request.id] = Draft(request=request, stream=stream_of(request.key))
        self.waiting.append(self.drafts[request.id])

    @property
    def idle(self) -> bool:
        return not self.drafts and not self._events

    @torch.no_grad()
    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Up to `window` steps. Reports every running request's new tokens and what ended."""
        for _ in range(self.window):
            if not self.drafts:
                break
            self._step()
        self._leave(self._read(range(len(self.running))))
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
            self.waiting.remove(draft)
            del self.drafts[id]
        return draft.sample(self.decode)

    def load(self, weights: Weights, version: int) -> None:
        if weights.module is not self.decoder:
            raise ModelError("this engine samples from the learner's own model: it takes no weights from elsewhere.")
        self._return_all()
        self.version = version

    def close(self) -> None:
        self.drafts.clear()
        self.waiting, self.running, self._events = [], [], []
        self.cache = None
        self._closed = True

    def _return_all(self) -> None:
        """Nobody has a row, nothing is cached. What was drawn and not yet read will be drawn again, the same."""
        self.waiting, self.running = self.running + self.waiting, []
        self.cache = None

    # ---- a step

    def _step(self) -> None:
        """One token for every row; those of a new batch come out of their prompts."""
        if self.running:
            self.mask = F.pad(self.mask, (0, 1), value=1)
            hidden = self._forward(self.slots.last[: len(self.running), None])
        else:
            hidden = self._begin()
        self._draw(hidden)

    def _begin(self) -> Tensor:
        """Give the next batch its rows. What several continue is computed once."""
        self.running = self._next()
        del self.waiting[: len(self.running)]
        self.slots.place(self.running, 0)
        self.slots.survey(self.running)
        rows: dict[tuple[int, ...], int] = {}
        order = []
        for draft in self.running:
            draft.begin(self.version)
            order.append(rows.setdefault(draft.known, len(rows)))
        width = max(map(len, rows))
        self.mask = self._tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        hidden = self._forward(self._tensor([[0] * (width - len(row)) + list(row) for row in rows]))
        if len(rows) == len(order):
            return hidden
        self._keep(self._tensor(order))
        return hidden.index_select(0, self._tensor(order))

    def _next(self) -> list[Draft]:
        """Waiting drafts, in their order, that fit side by side: each row is as wide as the longest may become."""
        taken: list[Draft] = []
        rows: set[tuple[int, ...]] = set()
        longest = left = 0
        for draft in self.waiting[: self.num_slots]:
            rows.add(known := draft.known)
            longest = max(longest, len(known))
            left = max(left, draft.request.sampling.max_tokens - len(draft.tokens))
            if taken and (longest + left > self.max_context or longest * len(rows) > PREFILL_TOKENS):
                break
            taken.append(draft)
        return taken

    def _forward(self, tokens: Tensor) -> Tensor:
        """The hidden states of the last column."""
        try:
            hidden, self.cache = self.decoder.run(tokens, self.mask, self.cache, keep=True)
        except torch.OutOfMemoryError as e:
            rows, columns = self.mask.shape
            self._return_all()
            raise ConfigError(f"out of memory with {rows} samples of {columns} tokens: lower engine.slots.") from e
        return hidden[:, -1]

    def _draw(self, hidden: Tensor) -> None:
        """Draw a token for every row; who is done leaves."""
        chunk, done = max(1, LOGITS // self.decoder.config.vocab_size), []
        for low in range(0, len(hidden), chunk):
            part = hidden[low : low + chunk]
            here = slice(low, low + len(part))
            logits = wide_product(part, self.decoder.head_weight)
            drawn = draw(logits, self.slots.settings(here), self.slots.uniforms(here))
            if not bool(drawn.logprobs.isfinite().all()):
                self._return_all()
                raise damaged(self.version)
            done.append(self.slots.record(here, drawn))
        if ended := torch.cat(done).nonzero()[:, 0].tolist():
            self._leave(self._read(ended))

    # ---- leaving

    def _read(self, rows: Sequence[int]) -> list[int]:
        """Take what these rows drew into their drafts, report it, tell which rows have ended."""
        ended: list[int] = []
        for row, drawn in zip(rows, self.slots.read_back(rows) if rows else [], strict=True):
            draft = self.running[row]
            self._events.append(draft.hear(*drawn, self.decode))
            if draft.finish is not None:
                ended.append(row)
        return ended

    def _leave(self, rows: Sequence[int]) -> None:
        """Free these rows; the others close up."""
        if not rows:
            return
        gone = set(rows)
        for row in gone:
            del self.drafts[self.running[row].request.id]
        stay = [row for row in range(len(self.running)) if row not in gone]
        self.running = [self.running[row] for row in stay]
        if not stay:
            self.cache = None
            return
        self.slots.move(stay, list(range(len(stay))))
        self._keep(self._tensor(stay))

    def _keep(self, rows: Tensor) -> None:
        """The rows of mask and cache become these, each as often as it is named."""
        self.cache.reorder_cache(rows)
        self.mask = self.mask.index_select(0, rows)

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)
