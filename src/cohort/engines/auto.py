"""The engine for models outside the native family: batches of requests on transformers' own classes and caches.

The rows of a batch are padded on the left. So their next tokens stand in one column, and the distances between the
tokens of a row are the same as without padding. A request that ends leaves at once: the cache is copied without its
row. That costs no more than a step, because the cache copies itself at every token anyway. A batch begins when the one
before has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.engines.base import Abilities, Event, Request, Weights, WorkCounters
from cohort.engines.draft import Draft
from cohort.engines.native.engine import MAX_LOGITS
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
from cohort.errors import ConfigError, ModelError
from cohort.models.auto import AutoDecoder
from cohort.models.functions import multiply_wide
from cohort.types import Finish, Sample

# Most prompt tokens in one forward, padding included. A longer prompt has a forward of its own.
PREFILL_TOKENS = 1 << 15
WINDOW = 8  # steps between two reports, unless another number is asked for


class AutoEngine:
    """Samples with the decoder that the learner trains. Same protocol, random numbers and meaning as `NativeEngine`."""

    name = "transformers"
    abilities = Abilities()

    def __init__(
        self,
        decoder: AutoDecoder,
        tokenizer_decode: Callable[[list[int]], str],
        *,
        slots: int,
        max_context: int,
        window: int = WINDOW,
    ) -> None:
        check_engine_limits(slots, window, max_context, decoder.config.max_positions)
        self.decoder, self.decode = decoder, tokenizer_decode
        self.num_slots = slots
        self.max_context = max_context
        self.window = window
        self.device = decoder.embed.device
        self.version = 0
        self.drafts: dict[str, Draft] = {}  # all drafts that have not ended, by request id
        self.waiting: list[Draft] = []
        self.running: list[Draft] = []  # by row
        float_dtype = torch.float64 if decoder.embed.dtype == torch.float64 else torch.float32
        self.slots = Slots(slots, window, float_dtype, self.device)
        self.cache: Any = None  # transformers' cache of the running rows
        # [rows, columns of the cache], 0 = padding.
        self.mask = torch.zeros(0, 0, dtype=torch.long, device=self.device)
        self._events: list[Event] = []
        self._closed = False
        self.work = WorkCounters()

    # ---- protocol

    def submit(self, request: Request) -> None:
        """Queues a request for one of the next batches. Raises ConfigError for a request that can never be served.

        Also raises ConfigError if the id is under way already, and EngineError after `close`.
        """
        if self._closed:
            raise closed_engine_error(self.name)
        check_request(request, self.max_context, self.decoder.config.vocab_size, self.drafts)
        self.drafts[request.id] = Draft(request=request, random_stream=derive_random_stream(request.key))
        self.waiting.append(self.drafts[request.id])

    @property
    def idle(self) -> bool:
        """Whether no request is under way and no event waits to be reported."""
        return not self.drafts and not self._events

    @torch.no_grad()
    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Runs up to `self.window` decode steps and returns the events: new tokens per request, and samples that ended.

        Waiting requests begin only when no row is left. `timeout` is ignored, because the work is done in this process.
        Raises ConfigError if memory runs out and ModelError if a log-probability is not finite; then all requests wait
        again.
        """
        for _ in range(self.window):
            if not self.drafts:
                break
            self._run_step()
        self._remove_rows(self._read_rows(range(len(self.running))))
        events, self._events = self._events, []
        return events

    def abort(self, id: str) -> Sample:
        """Stops a running or waiting request and returns its sample so far, with finish = abort.

        Raises CohortError for an unknown id.
        """
        draft = self.drafts.get(id)
        if draft is None:
            raise unknown_request_error(id)
        draft.finish = Finish.ABORT
        if draft in self.running:
            self._remove_rows([self.running.index(draft)])
        else:
            self.waiting.remove(draft)
            del self.drafts[id]
        return draft.to_sample(self.decode)

    def forget(self, id: str) -> None:
        """Does nothing: no KV is kept after a request has ended. One that continues it computes all its tokens."""

    def load(self, weights: Weights, version: int) -> None:
        """Sets `version` and drops the cache. Running requests wait again until their KV is recomputed.

        Nothing is copied: `weights` must be those of the engine's own decoder, else ModelError is raised.
        """
        if weights.module is not self.decoder:
            raise ModelError(
                "the transformers engine samples from the learner's own model, but got weights of another one; "
                "pass `load` the weights of the learner whose decoder the engine was made with."
            )
        self._requeue_all()
        self.version = version

    def close(self) -> None:
        """Drops every request and the cache. A later `submit` raises EngineError."""
        self.drafts.clear()
        self.waiting = []
        self.running = []
        self._events = []
        self.cache = None
        self._closed = True

    def _requeue_all(self) -> None:
        """Puts all running requests back in the queue, before the waiting ones, and drops the cache.

        Tokens that were drawn but not yet read from the device will be drawn again.
        """
        # Drafts that had a row are the first to get one again.
        self.waiting, self.running = self.running + self.waiting, []
        self.cache = None

    # ---- a step

    def _run_step(self) -> None:
        """Draws one token for every row (running request). If there is no row, starts the next batch first.

        Some request must be running or waiting. Rows that end are reported and removed.
        """
        if self.running:
            # The new column is a real token in every row.
            self.mask = F.pad(self.mask, (0, 1), value=1)
            hidden = self._run_decoder(self.slots.last_token[: len(self.running), None])
        else:
            hidden = self._start_batch()
        self._draw_tokens(hidden)

    def _start_batch(self) -> Tensor:
        """Moves waiting requests into rows and computes their known tokens: prompts, and tokens drawn before.

        Returns the hidden states to draw the next tokens from, [rows, d]. Equal token sequences are computed once.
        """
        self.running = self._select_batch()
        del self.waiting[: len(self.running)]
        self.slots.place_drafts(self.running, 0)
        self.slots.note_used_options(self.running)
        rows: dict[tuple[int, ...], int] = {}  # distinct token sequences -> their row in the forward
        order = []  # row in the forward of each running draft
        for draft in self.running:
            draft.set_version(self.version)
            order.append(rows.setdefault(draft.all_tokens, len(rows)))
        # Padded on the left. The padding token 0 is masked.
        width = max(map(len, rows))
        self.mask = self._make_tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        hidden = self._run_decoder(self._make_tensor([[0] * (width - len(row)) + list(row) for row in rows]))
        # Without siblings, every row of the forward is the row of one draft already.
        if len(rows) == len(order):
            return hidden
        self._select_rows(self._make_tensor(order))
        return hidden.index_select(0, self._make_tensor(order))

    def _select_batch(self) -> list[Draft]:
        """Returns the first waiting drafts that fit into one batch, at least one if any waits. They stay in the queue.

        A batch has at most `num_slots` rows. All rows are padded to the longest known tokens and may grow by the
        largest number of tokens that one of them may still draw; the sum must stay within `max_context`. The tokens to
        compute, padding included and equal rows counted once, must stay within PREFILL_TOKENS.
        """
        taken: list[Draft] = []
        rows: set[tuple[int, ...]] = set()
        longest = most_new = 0
        for draft in self.waiting[: self.num_slots]:
            rows.add(known := draft.all_tokens)
            longest = max(longest, len(known))
            most_new = max(most_new, draft.request.sampling.max_tokens - len(draft.tokens))
            if taken and (longest + most_new > self.max_context or longest * len(rows) > PREFILL_TOKENS):
                break
            taken.append(draft)
        return taken

    def _run_decoder(self, tokens: Tensor) -> Tensor:
        """Runs tokens [rows, columns] after those in the cache, which takes them up. `self.mask` covers them already.

        Returns the hidden states of the last column, [rows, d]. If memory runs out, all requests wait again and
        ConfigError is raised.
        """
        try:
            hidden, self.cache = self.decoder.run_padded(tokens, self.mask, self.cache, keep_cache=True)
        except torch.OutOfMemoryError as e:
            rows, columns = self.mask.shape
            self._requeue_all()
            raise ConfigError(
                f"the GPU ran out of memory with {rows} samples of {columns} tokens at once. Start again with fewer "
                "slots (cohort train: --engine.slots; cohort eval: --slots), a lower max_tokens or a smaller --model."
            ) from e
        return hidden[:, -1]

    def _draw_tokens(self, hidden: Tensor) -> None:
        """Draws and records one token per row from its hidden state [rows, d]. Rows that end are reported and removed.

        If a log-probability is not finite, all requests wait again and ModelError is raised.
        """
        # The rows are drawn in chunks, because the logits of all rows could fill the memory.
        chunk, done = max(1, MAX_LOGITS // self.decoder.config.vocab_size), []
        for low in range(0, len(hidden), chunk):
            part = hidden[low : low + chunk]
            here = slice(low, low + len(part))
            logits = multiply_wide(part, self.decoder.head_weight)
            drawn = draw_tokens(logits, self.slots.get_settings(here), self.slots.draw_uniforms(here))
            if not bool(drawn.logprobs.isfinite().all()):
                self._requeue_all()
                raise damaged_weights_error(self.version)
            done.append(self.slots.record_tokens(here, drawn))
        if ended := torch.cat(done).nonzero()[:, 0].tolist():
            self._remove_rows(self._read_rows(ended))

    # ---- leaving

    def _read_rows(self, rows: Sequence[int]) -> list[int]:
        """Adds the tokens drawn since the last read to the drafts of these rows, and queues one event per row.

        Returns those of the rows whose request has ended. They are not removed yet.
        """
        ended: list[int] = []
        for row, drawn in zip(rows, self.slots.read_and_clear(rows) if rows else [], strict=True):
            draft = self.running[row]
            self._events.append(draft.add_and_report(*drawn, self.decode))
            if draft.finish is not None:
                ended.append(row)
        return ended

    def _remove_rows(self, rows: Sequence[int]) -> None:
        """Drops the requests in these rows. The other rows move up and keep their order.

        If no row is left, the cache is dropped.
        """
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
        self.slots.move_slots(stay, list(range(len(stay))))
        self._select_rows(self._make_tensor(stay))

    def _select_rows(self, rows: Tensor) -> None:
        """Rebuilds mask and cache from the rows with these indices, in this order. An index may occur several times."""
        self.cache.reorder_cache(rows)
        self.mask = self.mask.index_select(0, rows)

    def _make_tensor(self, values: Any) -> Tensor:
        """Returns integers, in lists of any depth, as an int64 tensor on the engine's device."""
        return torch.tensor(values, dtype=torch.long, device=self.device)
