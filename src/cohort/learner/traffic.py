"""Bytes that ranks hand to collectives, computed from shapes. `World.progress` counts those that they really do."""

from __future__ import annotations

import math
from collections.abc import Sequence

# What every optimizer step sums besides gradients, in float64: the denominators of the loss, and a squared norm.
COUNTS_BYTES = 4 * 8
NORM_BYTES = 8


def collective_bytes(
    shapes: Sequence[tuple[int, ...]], *, ranks: int, shard: str, bytes_per_number: int, bytes_per_master: int
) -> dict[str, int]:
    """Returns the bytes that one rank hands to collectives in one optimizer step, by the kind of the collective.

    The step is forward and backward of a minibatch and the change of the weights. `shapes` are those of the trained
    parameters, `bytes_per_number` is the size of a number of theirs, and `bytes_per_master` that of a master's.

    >>> shapes = [(3, 5), (4,)]
    >>> collective_bytes(shapes, ranks=2, shard="none", bytes_per_number=2, bytes_per_master=4)
    {'sum': 108}
    >>> collective_bytes(shapes, ranks=2, shard="optimizer", bytes_per_number=2, bytes_per_master=4)
    {'sum': 40, 'sum_scattered': 80, 'join': 20}
    """
    num_trained = sum(map(math.prod, shapes))
    if shard == "optimizer":
        slice_size = -(-num_trained // ranks)
        return {
            "sum": COUNTS_BYTES + NORM_BYTES,
            "sum_scattered": ranks * slice_size * bytes_per_master,
            "join": slice_size * bytes_per_number,
        }
    assert shard == "none", f"unknown shard {shard}"
    return {"sum": COUNTS_BYTES + num_trained * bytes_per_master}
