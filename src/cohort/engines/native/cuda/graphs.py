"""Captured steps, one a variant, made when first needed and checked against moved memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from cohort.engines.native.cuda.pages import Arena
from cohort.engines.native.cuda.step import State, Variant, make_step
from cohort.models.decoder import Decoder

log = logging.getLogger(__name__)


def bucket(rows: int, most: int) -> int:
    """Rows of the graph that serves this many: few sizes, little waste.

    >>> [bucket(n, 512) for n in (1, 9, 17, 65, 100, 300, 512)]
    [8, 16, 32, 96, 128, 320, 512]
    """
    size = 8
    while size < rows:
        size += 8 if size < 16 else 16 if size < 64 else 32 if size < 128 else 64 if size < 512 else 128
    return min(size, most)


class Graphs:
    """variant -> something to call for one step. On a CPU (Triton's interpreter) the step itself."""

    def __init__(self, decoder: Decoder, state: State, arena: Arena) -> None:
        self.decoder, self.state, self.arena = decoder, state, arena
        self.steps: dict[Variant, Callable[[], None]] = {}
        self.captures = 0
        self.seconds = 0.0
        self._captured: tuple[int, ...] = ()
        self._side: torch.cuda.Stream | None = None  # one for all: each keeps a workspace of the matrix library
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def get(self, variant: Variant) -> Callable[[], None]:
        now = self._addresses()
        if self.steps and now != self._captured:
            log.warning("weights or buffers have moved since %d graphs were captured: capturing again", len(self.steps))
            self.steps.clear()
            self._pool = None  # a pool whose graphs are gone may not be captured into again
        if variant not in self.steps:
            self._captured = now
            self.steps[variant] = self._capture(variant)
        return self.steps[variant]

    def _addresses(self) -> tuple[int, ...]:
        weights = tuple(p.data_ptr() for p in self.decoder.parameters())
        return (*weights, self.arena.kv.data_ptr(), *self.state.addresses())

    def _capture(self, variant: Variant) -> Callable[[], None]:
        step = make_step(self.decoder, self.state, self.arena, variant)
        if self.arena.kv.device.type != "cuda":
            return step
        began = time.perf_counter()
        # run once for compilation and library set-up; with every row done a step changes nothing
        done = self.state.done.clone()
        self.state.done.fill_(1)
        try:
            graph = self._recorded(step)
        finally:
            self.state.done.copy_(done)
        self.captures += 1
        self.seconds += time.perf_counter() - began
        log.debug("captured a step of %d rows in %.2f s", variant.rows, time.perf_counter() - began)
        return graph.replay

    def _recorded(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        self._side = self._side or torch.cuda.Stream()
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            step()
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        return graph
