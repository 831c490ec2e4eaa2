"""Errors on several ranks: all ranks learn of an error where they can, and each is said once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import distributed_c10d

from cohort.errors import AgreedError, CohortError, RankError
from cohort.ranks.environment import read_place
from cohort.world import World

R = TypeVar("R")
# Where the ranks of this process note what was said. It outlives their connections. None = it has not joined others.
_store: Any = None
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
    # All know of the one, and the ranks cannot agree on anything without a rank that is gone.
    except (AgreedError, RankError):
        raise
    except CohortError as error:
        problem = str(error) or type(error).__name__
    for rank, text in enumerate(world.gather(problem)):
        if text:
            raise AgreedError(text if rank == 0 else f"rank {rank}: {text}")
    return result


def remember_store() -> None:
    """Keeps the store by which the ranks found each other, so that errors are said once also after they have parted."""
    global _store
    _store = distributed_c10d._get_default_store()


def should_say(error: CohortError) -> bool:
    """Returns whether this rank says an error: the first rank what all know of, and of equal errors one rank.

    That other ranks are gone is said only if none of them has said why.
    """
    if isinstance(error, AgreedError):
        return read_place()[0] == 0
    store = _store
    if store is None:
        return True
    try:
        if isinstance(error, RankError):
            time.sleep(_PATIENCE)
            return store.add("cohort/errors", 0) == 0 and store.add("cohort/lost", 1) == 1
        store.add("cohort/errors", 1)
        return store.add(f"cohort/error/{hashlib.sha256(str(error).encode()).hexdigest()}", 1) == 1
    # The rank or the launcher that keeps the store may be the one that is gone.
    except RuntimeError:
        return True
