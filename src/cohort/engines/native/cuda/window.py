"""Steps under way: when they are through, and what they drew."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.engines.native.draft import NativeDraft
from cohort.engines.native.slots import Slots


class Timer:
    """Seconds of device work, and when its results are on the host."""

    def __init__(self, device: torch.device) -> None:
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if device.type == "cuda" else []
        self.seconds = -time.perf_counter()
        self._record(0)

    def _record(self, index: int) -> None:
        if self.events:
            self.events[index].record()

    def stop(self) -> None:
        """The work has been started."""
        self.seconds += time.perf_counter()
        self._record(1)

    def copied(self) -> None:
        """The copies to the host have been started."""
        self._record(2)

    def wait(self) -> float:
        if self.events:
            self.events[2].synchronize()
            self.seconds = self.events[0].elapsed_time(self.events[1]) / 1000
        return self.seconds


@dataclass(kw_only=True)
class Window:
    """Steps that were started, and where their results will lie on the host."""

    rows: list[NativeDraft | None]
    steps: int
    results: list[Tensor]
    timer: Timer

    def __post_init__(self) -> None:
        self.members = {id(d) for d in self.rows if d is not None}


class Results:
    """Copies of the slots' windows on the host, in pinned memory that is used again."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.unused: list[list[Tensor]] = []

    def _held(self) -> list[Tensor]:
        s = self.slots
        return [s.filled, s.tokens, s.logprobs, s.kept]

    def fetch(self, rows: int) -> list[Tensor]:
        """Start copying the first `rows` rows. Not waited for."""
        pinned = self.slots.device.type == "cuda"
        room = (
            self.unused.pop()
            if self.unused
            else [torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned) for x in self._held()]
        )
        for host, device in zip(room, self._held(), strict=True):
            if device is not self.slots.kept or self.slots.truncated:
                host[:rows].copy_(device[:rows], non_blocking=True)
        return room

    def read(self, window: Window) -> tuple[list[int], list[list[int]], list[list[float]], list[list[float]]]:
        """filled, tokens, log-probabilities and kept mass of a window that is through, by row."""
        n, (filled, tokens, logprobs, kept) = len(window.rows), window.results
        self.unused.append(window.results)
        masses = kept[:n].tolist() if self.slots.truncated else [[]] * n
        return filled[:n].tolist(), tokens[:n].tolist(), logprobs[:n].tolist(), masses
