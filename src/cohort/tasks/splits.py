"""Which split a problem belongs to: decided by its numbers, so no split can hold another's problem.

The multiset of the numbers alone decides. It knows nothing of seeds, knobs, phrasing, spaces, parentheses,
signs, operators or order: two problems made of the same numbers are always in the same split, whatever task
settings made them. `traces` is what the bundled model was taught on; training and testing never enter it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

from cohort.errors import TaskError

SPLITS = ("train", "test", "traces")
_REGIONS = ("train",) * 5 + ("test",) * 2 + ("traces",) * 3


def split_of(numbers: Iterable[int]) -> str:
    """The split of every problem made of these numbers.

    >>> split_of([3, 7]) == split_of([-7, 3])
    True
    """
    return _split_of(tuple(sorted(map(abs, numbers))))


@lru_cache(maxsize=4096)
def _split_of(numbers: tuple[int, ...]) -> str:
    digest = blake2b(",".join(map(str, numbers)).encode(), digest_size=8, person=b"cohort-split").digest()
    return _REGIONS[int.from_bytes(digest, "little") % len(_REGIONS)]


def check_split(task: str, split: str) -> None:
    """Refuse a split that does not exist."""
    if split not in SPLITS:
        raise TaskError(f'task "{task}" has no split "{split}"; it has {", ".join(SPLITS)}')
