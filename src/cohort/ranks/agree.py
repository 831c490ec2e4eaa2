"""Errors on several ranks: all ranks learn of an error where they can, and each is said once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from cohort.errors import AgreedError, CohortError, RankError
from cohort.world import World

R = TypeVar("R")
# Seconds after which a rank that has lost the others looks whether one of them has said why.
_PATIENCE = 2.0


def agree_on_errors(world: World, action: Callable[[], R]) -> R:
    """Returns what `action()` returns. If it raises a CohortError on any rank, all ranks raise the error of the first.

    So a mistake is said once, and no rank waits for one that has ended. Every rank must call it.
    """
    if world.size == 1:
        return action()
    problem = ""
    try:
        result = action()
    # The ranks cannot agree on anything without the one that is gone.
    except RankError:
        raise
    except CohortError as error:
        problem = str(error) or type(error).__name__
    for rank, text in enumerate(world.gather(problem)):
        if text:
            raise AgreedError(text if rank == 0 else f"rank {rank}: {text}")
    return result


def should_say(error: CohortError) -> bool:
    """Returns whether this rank says an error: the first rank what all know of, and of equal errors one rank.

    That other ranks are gone is said only if none of them has said why.
    """
    if not dist.is_initialized():
        return True
    if isinstance(error, AgreedError):
        return dist.get_rank() == 0
    try:
        store = distributed_c10d._get_default_store()
        if isinstance(error, RankError):
            time.sleep(_PATIENCE)
            return store.add("cohort/errors", 0) == 0 and store.add("cohort/lost", 1) == 1
        store.add("cohort/errors", 1)
        return store.add(f"cohort/error/{hashlib.sha256(str(error).encode()).hexdigest()}", 1) == 1
    # The rank or the launcher that keeps the store may be the one that is gone.
    except RuntimeError:
        return True
