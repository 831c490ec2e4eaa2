"""Waiting of torch's threads on a busy machine, in a process that imported torch before Cohort."""

from __future__ import annotations

import threading

import torch

from cohort.system.process import spins_long

_held: threading.Thread | None = None  # the thread whose pool of threads makes all others wait briefly


def throttle_thread_spinning() -> None:
    """Makes torch's threads sleep soon when they wait, if they would spin for long. Later calls do nothing.

    libgomp, the library of torch's threads on Linux, spins briefly while it manages more threads than there are
    processors. So a second pool is made: by a thread that computes once, and then sleeps until the process ends. On two
    processors with five other busy processes, 300 small products took 0.1 s, and 5 to 10 s without it. The number of
    threads of a computation, and so every result, stays the same.
    """
    global _held
    num_threads = torch.get_num_threads()
    if _held is not None or num_threads == 1 or not spins_long():
        return
    is_made = threading.Event()

    def hold_pool() -> None:
        """Makes a pool of threads, and keeps it."""
        torch.set_num_threads(num_threads)
        # Large enough that torch divides it among all threads.
        torch.ones(1 << 20).add_(1)
        is_made.set()
        threading.Event().wait()

    _held = threading.Thread(target=hold_pool, name="cohort-idle-threads", daemon=True)
    _held.start()
    is_made.wait()
