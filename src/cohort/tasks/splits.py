"""The split that a generated problem belongs to: decided by its numbers, so that no two splits share a problem.

Only the multiset of the numbers counts. Seeds, settings, phrasing, spaces, parentheses, signs, operators and order do
not: two problems made of the same numbers are always in the same split, whatever task settings made them. The split
`traces` holds the problems that the bundled model was taught on; training and testing never use them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

from cohort.errors import TaskError

SPLITS = ("train", "test", "traces")
# A hash of the numbers chooses one of these ten entries: half of all problems are for training.
_REGIONS = ("train",) * 5 + ("test",) * 2 + ("traces",) * 3


def assign_split(numbers: Iterable[int]) -> str:
    """Returns the split ("train", "test" or "traces") to which every problem made of these numbers belongs.

    The order and the signs of the numbers do not matter.

    >>> assign_split([3, 7]) == assign_split([-7, 3])
    True
    """
    return _assign_sorted(tuple(sorted(map(abs, numbers))))


@lru_cache(maxsize=4096)
def _assign_sorted(numbers: tuple[int, ...]) -> str:
    """Returns the split of sorted, non-negative numbers, chosen by a hash of them."""
    digest = blake2b(",".join(map(str, numbers)).encode(), digest_size=8, person=b"cohort-split").digest()
    return _REGIONS[int.from_bytes(digest, "little") % len(_REGIONS)]


def check_split(task: str, split: str) -> None:
    """Raises TaskError unless `split` is one of SPLITS.

    Tasks that generate their rows call it; `task` is for the message.
    """
    if split not in SPLITS:
        raise TaskError(f'task "{task}" has no split "{split}"; use one of {", ".join(SPLITS)}')
