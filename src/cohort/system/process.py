"""What a process that trains or samples asks of its operating system and its interpreter."""

from __future__ import annotations

import ctypes
import gc
import os
import sys

from cohort.errors import ConfigError

# mallopt(3): glibc's parameters, and the values that keep freed memory in the process
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def wait_briefly() -> None:
    """Threads of torch spin while they wait, which on a busy machine made steps ten times slower. Call before torch.

    A short spin costs a tenth on a quiet machine; none at all, half. The user's own choice stands.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def keep_memory() -> None:
    """Freed memory stays with the process, up to blocks of 1 GiB.

    By default every activation goes back to the system and comes again page by page, each page cleared: a
    twentieth of a training step on CPU. Peak memory is the same. Without effect where the C library is not glibc.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, -1)  # never
    mallopt(_M_TOP_PAD, 1 << 26)


def settle_objects() -> None:
    """What exists now is never looked at again by the collector of cycles.

    Its full pass over everything torch and transformers import takes a tenth of a second, in which a GPU that is fed
    two windows ahead runs dry.
    """
    gc.collect()
    gc.freeze()


def require_one_process() -> None:
    """Refuse a process that torchrun or a scheduler started as one of several: each would do the whole work again."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {size}, but a run has one process: each of the {size} would make the same run again. "
            "Start one process, without torchrun, or unset WORLD_SIZE."
        )
