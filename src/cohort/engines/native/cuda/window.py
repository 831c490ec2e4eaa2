"""Windows of decode steps that run on the device: when they are finished, and what they drew."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.engines.native.draft import NativeDraft
from cohort.engines.native.slots import Slots


class WindowTimer:
    """Measures the device time of a window, and waits until its results are on the host.

    On a CPU it measures the time until `mark_work_queued`, since the work is then already done.
    """

    def __init__(self, device: torch.device) -> None:
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if device.type == "cuda" else []
        self.seconds = -time.perf_counter()
        self._record_event(0)

    def _record_event(self, index: int) -> None:
        """Queues CUDA event `index`: 0 before the steps, 1 after them, 2 after the copies. Does nothing on a CPU."""
        if self.events:
            self.events[index].record()

    def mark_work_queued(self) -> None:
        """Marks the end of the steps. The caller must have queued all steps of the window."""
        self.seconds += time.perf_counter()
        self._record_event(1)

    def mark_copies_queued(self) -> None:
        """Marks the end of the copies to the host. The caller must have queued all of them."""
        self._record_event(2)

    def wait_for_results(self) -> float:
        """Waits until the copies to the host are complete. Returns the seconds that the steps took on the device.

        On a CPU there is nothing to wait for: the seconds are those until `mark_work_queued`.
        """
        if self.events:
            self.events[2].synchronize()
            self.seconds = self.events[0].elapsed_time(self.events[1]) / 1000
        return self.seconds


@dataclass(kw_only=True)
class Window:
    """Decode steps that were launched together, and the host buffers that get their results."""

    rows: list[NativeDraft | None]  # drafts by row when it was launched; None = empty row
    steps: int
    results: list[Tensor]
    timer: WindowTimer

    def __post_init__(self) -> None:
        # By identity: drafts are compared as objects.
        self.draft_ids = {id(d) for d in self.rows if d is not None}


class HostCopies:
    """Copies of the slots' windows in pinned host memory, which is reused."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.free_buffers: list[list[Tensor]] = []

    def _list_sources(self) -> list[Tensor]:
        """Returns the device tensors to copy: number of tokens, tokens, log-probabilities and kept mass per slot."""
        s = self.slots
        return [s.num_filled, s.tokens, s.logprobs, s.kept_mass]

    def start_copy(self, rows: int) -> list[Tensor]:
        """Starts copying the results of the first `rows` slots to the host and does not wait.

        Returns the host buffers, which are filled later: number of tokens, tokens, log-probabilities and kept mass.
        Kept mass is copied only if some row truncates. Buffer rows from `rows` on are not filled.
        """
        pinned = self.slots.device.type == "cuda"
        buffers = (
            self.free_buffers.pop()
            if self.free_buffers
            else [torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned) for x in self._list_sources()]
        )
        for host, device in zip(buffers, self._list_sources(), strict=True):
            # Kept mass is copied only if some row truncates.
            if device is not self.slots.kept_mass or self.slots.has_truncation:
                host[:rows].copy_(device[:rows], non_blocking=True)
        return buffers

    def read(self, window: Window) -> tuple[list[int], list[list[int]], list[list[float]], list[list[float]]]:
        """Returns the results of a finished window: number of tokens, tokens, log-probabilities and kept mass per row.

        The caller must have waited for the copies. Only the first `number of tokens` items of a row are valid. Kept
        mass is [] for every row if no running draft truncates. The window's host buffers become free for the next copy.
        """
        n, (filled, tokens, logprobs, kept) = len(window.rows), window.results
        # Buffers may be reused at once: `tolist` below copies before the next window is launched.
        self.free_buffers.append(window.results)
        masses = kept[:n].tolist() if self.slots.has_truncation else [[]] * n
        return filled[:n].tolist(), tokens[:n].tolist(), logprobs[:n].tolist(), masses
