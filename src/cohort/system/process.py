"""Settings of a process that trains or samples (threads, memory, garbage collection), and how processes end."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys

from cohort.errors import ConfigError

# Numbers of parameters of glibc's allocator, from mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
# Environment variables that say how many threads the libraries of a new process use for arithmetic.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def require_unix() -> None:
    """Raises ConfigError on Windows, which lacks much of what runs, locks and scoring workers are made of."""
    if sys.platform == "win32":
        raise ConfigError(
            "Cohort runs on Linux and macOS. On Windows use WSL: run `wsl --install` once, then install and start "
            "Cohort in its Linux shell."
        )


def shorten_thread_spinning() -> None:
    """Makes torch's threads sleep after a short time of busy waiting, if torch is not imported yet.

    Otherwise it does nothing, because the library of threads has read its settings: see `spins_long`.

    Sets GOMP_SPINCOUNT to 5000 and KMP_BLOCKTIME to 1 (millisecond) in the environment, each unless it is set, and
    neither if OMP_WAIT_POLICY is set. The first is for the library of threads of torch on Linux, the second for that of
    macOS and of some other builds. With the first, on a busy machine long spinning made steps ten times slower. On a
    quiet machine a short spin makes steps a tenth slower, no spin a half slower.
    """
    if "OMP_WAIT_POLICY" not in os.environ and "torch" not in sys.modules:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
        os.environ.setdefault("KMP_BLOCKTIME", "1")


def spins_long() -> bool:
    """Returns whether torch's threads spin for long while they wait, because torch was imported before Cohort.

    Only on Linux, and not if the user has chosen how they wait.
    """
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    return sys.platform.startswith("linux") and not chosen


def name_signal(number: int) -> str:
    """Returns the name of a signal, like SIGSEGV; "signal 40" for one without a name.

    >>> name_signal(11), name_signal(40)
    ('SIGSEGV', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(code: int) -> str:
    """Returns how a process ended, from its exit code: below 0 it is minus the signal that ended it.

    >>> describe_exit(-9), describe_exit(1)
    ('was ended by SIGKILL', 'exited with code 1')
    """
    return f"was ended by {name_signal(-code)}" if code < 0 else f"exited with code {code}"


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory in the process for reuse, in blocks of up to 1 GiB.

    By default the memory of every activation goes back to the system and is then fetched again page by page, each page
    cleared. That takes a twentieth of a training step on a CPU. Peak memory is the same. It has no effect if the C
    library is not glibc, or if the user has set MALLOC_ variables.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    # Never gives memory at the end of the heap back.
    mallopt(_M_TRIM_THRESHOLD, -1)
    # Grows the heap by 64 MiB at a time.
    mallopt(_M_TOP_PAD, 1 << 26)


def freeze_objects() -> None:
    """Collects garbage now, and excludes all objects that remain from later garbage collection.

    A full collection over everything that torch and transformers import takes a tenth of a second. A GPU that has only
    two windows of work ahead (queued decode steps) would become idle in that time.
    """
    gc.collect()
    gc.freeze()


def require_one_process() -> None:
    """Raises ConfigError if torchrun or a scheduler started this process as one of several.

    That is so if the environment variable WORLD_SIZE is a number above 1; any other text in it is ignored.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        raise ConfigError(
            f"the environment variable WORLD_SIZE is {size}, but this command works in one process: each of the {size} "
            "would do all of the work. Start one process, without torchrun, and unset WORLD_SIZE."
        )
