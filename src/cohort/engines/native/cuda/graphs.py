"""Captured decode steps, one per variant. A step is captured when first needed, and again if memory has moved."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from cohort.engines.native.cuda.pages import PageArena
from cohort.engines.native.cuda.step import DecodeState, StepVariant, make_step
from cohort.models.decoder import Decoder

log = logging.getLogger(__name__)


def round_to_bucket(rows: int, most: int) -> int:
    """Returns the number of rows of the graph that serves `rows` rows: the next of a few sizes, at most `most`.

    The steps between sizes grow with the size, from 8 to 128.

    >>> [round_to_bucket(n, 512) for n in (1, 9, 17, 65, 100, 300, 512)]
    [8, 16, 32, 96, 128, 320, 512]
    """
    size = 8
    while size < rows:
        size += 8 if size < 16 else 16 if size < 64 else 32 if size < 128 else 64 if size < 512 else 128
    return min(size, most)


class GraphCache:
    """Functions that run one decode step, by variant. On a CPU (Triton's interpreter) they run without a graph."""

    def __init__(self, decoder: Decoder, state: DecodeState, arena: PageArena) -> None:
        self.decoder = decoder
        self.state, self.arena = state, arena
        self.steps: dict[StepVariant, Callable[[], None]] = {}
        self.num_captures = 0
        self.seconds = 0.0  # spent in captures
        self._captured_addresses: tuple[int, ...] = ()
        # One side stream for all captures, because each stream keeps a workspace of the matrix library.
        self._side_stream: torch.cuda.Stream | None = None
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def get_step(self, variant: StepVariant) -> Callable[[], None]:
        """Returns the function that runs one decode step of this variant.

        The step is captured as a CUDA graph now if it was not before. If weights or buffers have moved, all captured
        steps are dropped first, with a warning. On a CPU nothing is captured.
        """
        now = self._list_addresses()
        # A graph reads fixed addresses: after a move it would read freed memory.
        if self.steps and now != self._captured_addresses:
            log.warning("weights or buffers have moved since %d graphs were captured: capturing again", len(self.steps))
            self.steps.clear()
            # A memory pool whose graphs are gone may not be captured into again.
            self._pool = None
        if variant not in self.steps:
            self._captured_addresses = now
            self.steps[variant] = self._capture_step(variant)
        return self.steps[variant]

    def _list_addresses(self) -> tuple[int, ...]:
        """Returns the memory addresses of all weights, of the KV arena and of the state's buffers."""
        weights = tuple(p.data_ptr() for p in self.decoder.parameters())
        return (*weights, self.arena.kv.data_ptr(), *self.state.list_addresses())

    def _capture_step(self, variant: StepVariant) -> Callable[[], None]:
        """Captures the step of this variant as a CUDA graph and returns the function that replays it.

        The step also runs once before, with all rows marked as done, so that no row changes. On a CPU nothing is
        captured and the function runs the step itself.
        """
        step = make_step(self.decoder, self.state, self.arena, variant)
        if self.arena.kv.device.type != "cuda":
            return step
        began = time.perf_counter()
        # The step also runs once for real, for compilation and library set-up. With every row done it changes nothing.
        done = self.state.done.clone()
        self.state.done.fill_(1)
        try:
            graph = self._record_graph(step)
        finally:
            self.state.done.copy_(done)
        self.num_captures += 1
        self.seconds += time.perf_counter() - began
        log.debug("captured a step of %d rows in %.2f s", variant.rows, time.perf_counter() - began)
        return graph.replay

    def _record_graph(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Runs the step once on the side stream, then captures it, without running it, and returns the graph."""
        self._side_stream = self._side_stream or torch.cuda.Stream()
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            step()
        torch.cuda.current_stream().wait_stream(self._side_stream)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        return graph
