"""Mixtures of data sets: the text that names them, and the order in which their rows come."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cohort.errors import TaskError


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A data set of a mixture, and how many of its rows come relative to the others."""

    name: str
    weight: float = 1.0


@lru_cache(maxsize=256)
def read_mixture(text: str) -> tuple[Share, ...]:
    """Returns the data sets that the setting `dataset` names, in their order; () for an empty text.

    They are separated by commas or plus signs (`cohort sweep` takes a comma for the end of a value). Raises TaskError
    for a share that is no number above 0 and for a name that occurs twice. Whether the names exist is not checked.

    >>> read_mixture("chain_sum:2, leg_counting")
    (Share(name='chain_sum', weight=2.0), Share(name='leg_counting', weight=1.0))
    """
    shares: list[Share] = []
    for word in filter(None, (word.strip() for word in re.split("[,+]", text))):
        name, colon, number = word.partition(":")
        try:
            weight = float(number) if colon else 1.0
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise TaskError(
                f'the share "{number}" of the data set {name} is no number above 0; write --task.dataset {name}:2'
            )
        if any(share.name == name for share in shares):
            raise TaskError(f"the data set {name} is named twice in --task.dataset {text}; name it once")
        shares.append(Share(name=name, weight=weight))
    return tuple(shares)


def interleave(shares: Sequence[Share]) -> Iterator[str]:
    """Yields names of data sets without end: each time the one whose rows are furthest behind its share.

    >>> from itertools import islice
    >>> list(islice(interleave(read_mixture("a:2,b:1")), 6))
    ['a', 'b', 'a', 'a', 'b', 'a']
    """
    total = sum(share.weight for share in shares)
    counts = dict.fromkeys((share.name for share in shares), 0)
    position = 0
    while True:
        position += 1
        # Of several the first.
        chosen = max(shares, key=lambda share: share.weight * position / total - counts[share.name])
        counts[chosen.name] += 1
        yield chosen.name
