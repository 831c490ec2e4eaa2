"""The split that a row belongs to: that of a generated problem, and the validation split cut from training rows.

The numbers of a generated problem decide its split, so that no two splits share a problem. Only the multiset of the
numbers counts. Seeds, settings, phrasing, spaces, parentheses, signs, operators and order do not: two problems made of
the same numbers are always in the same split, whatever task settings made them. The split `traces` holds the problems
that the bundled model was taught on; training and testing never use them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

from cohort.errors import TaskError
from cohort.types import Row

SPLITS = ("train", "test", "traces")
MAX_ROWS = 10_000_000  # of a split: more would fill the memory before the first step
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


def cut_validation(rows: Sequence[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Returns the rows that stay for training, and those of the validation split: about `share` of `rows`.

    A hash of the id decides, so a row is on the same side whatever other rows there are, in whatever order and for
    whatever seed. A larger share only adds rows to the validation split.
    """
    held = {id for row in rows if _hash_id(id := row["id"]) < share}
    return [row for row in rows if row["id"] not in held], [row for row in rows if row["id"] in held]


def _hash_id(id: str) -> float:
    """Returns a number from 0 to below 1 that the id of a row decides."""
    digest = blake2b(id.encode(errors="surrogatepass"), digest_size=8, person=b"cohort-validate").digest()
    return int.from_bytes(digest, "little") / 2**64
