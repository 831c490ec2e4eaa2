"""What the environment variables of a launcher say: whether this process is a rank, and which. Needs no torch."""

from __future__ import annotations

import os

from cohort.errors import ConfigError

RENDEZVOUS = "COHORT_RENDEZVOUS"
"""Environment variable of a rank that Cohort started: the file by which the ranks find each other."""

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def is_rank() -> bool:
    """Returns whether a launcher has started this process as a rank. Raises ConfigError for half of its variables."""
    missing = _list_missing()
    size = os.environ.get("WORLD_SIZE", "1")
    if missing and size.isdecimal() and int(size) > 1:
        raise ConfigError(
            f"the environment variable WORLD_SIZE is {size}, but {', '.join(missing)} is not set, so that this process "
            "does not know which rank it is. Start ranks with --ranks N, torchrun or accelerate launch, or unset "
            "WORLD_SIZE."
        )
    return not missing


def has_place() -> bool:
    """Returns whether all variables of a rank are set. Unlike `is_rank` it never raises."""
    return not _list_missing()


def _list_missing() -> list[str]:
    """Returns the names of a rank's variables that are not set, or are no numbers."""
    return [name for name in _NAMES if not os.environ.get(name, "").isdecimal()]


def read_place() -> tuple[int, int, int]:
    """Returns (rank, number of ranks, rank on this machine) of a process that is a rank."""
    rank, size, local = (int(os.environ[name]) for name in _NAMES)
    return rank, size, local


def is_following_rank() -> bool:
    """Returns whether this process is a rank other than the first."""
    return is_rank() and read_place()[0] > 0


def count_local_ranks() -> int:
    """Returns the number of ranks on this machine: 1 if this process is none."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or read_place()[1]) if is_rank() else 1


def count_sharing_ranks(num_gpus: int) -> int:
    """Returns the most ranks of this machine that use the same one of its `num_gpus` GPUs."""
    return -(-count_local_ranks() // max(num_gpus, 1))
