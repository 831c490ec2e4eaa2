"""Bytes that ranks hand to collectives, computed from shapes. `World.progress` counts those that they really do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of trained parameters, by name as in the native decoder. Names of layers begin with "layers."."""

# What every optimizer step sums besides gradients, in float64: the denominators of the loss, and a squared norm.
COUNTS_BYTES = 4 * 8
NORM_BYTES = 8


def collective_bytes(
    shapes: Shapes, *, ranks: int, shard: str, bytes_per_number: int, bytes_per_master: int, passes: int = 1
) -> dict[str, int]:
    """Returns the bytes that one rank hands to collectives in one optimizer step, by the kind of the collective.

    The step is forward and backward of a minibatch and the change of the weights. `bytes_per_number` is the size of a
    number of the weights while they compute, `bytes_per_master` that of a master's. `passes` are the microbatches of
    the rank that has the most; they count only where the weights are divided.

    >>> shapes = {"embed": (3, 5), "norm.weight": (4,)}
    >>> collective_bytes(shapes, ranks=2, shard="none", bytes_per_number=2, bytes_per_master=4)
    {'sum': 108}
    >>> collective_bytes(shapes, ranks=2, shard="optimizer", bytes_per_number=2, bytes_per_master=4)
    {'sum': 40, 'sum_scattered': 80, 'join': 20}
    >>> collective_bytes(shapes, ranks=2, shard="full", bytes_per_number=2, bytes_per_master=4, passes=3)
    {'sum': 40, 'gather_weights': 72, 'reduce_gradients': 288}
    """
    if shard == "none" or ranks == 1:
        return {"sum": COUNTS_BYTES + sum(map(math.prod, shapes.values())) * bytes_per_master}
    sums = COUNTS_BYTES + NORM_BYTES
    if shard == "optimizer":
        slice_size = -(-sum(map(math.prod, shapes.values())) // ranks)
        scattered = ranks * slice_size * bytes_per_master
        return {"sum": sums, "sum_scattered": scattered, "join": slice_size * bytes_per_number}
    assert shard == "full", f"unknown shard {shard}"
    in_layers = _count_part((shape for name, shape in shapes.items() if name.startswith("layers.")), ranks)
    elsewhere = _count_part((shape for name, shape in shapes.items() if not name.startswith("layers.")), ranks)
    # A layer is gathered forward and again backward, the rest once for both.
    gathered = passes * (2 * in_layers + elsewhere) * bytes_per_number
    reduced = passes * ranks * (in_layers + elsewhere) * bytes_per_master
    return {"sum": sums, "gather_weights": gathered, "reduce_gradients": reduced}


def weights_bytes(shapes: Shapes, *, ranks: int, bytes_per_number: int) -> dict[str, int]:
    """Returns the bytes that one rank hands to collectives when divided weights are gathered once, by kind.

    >>> weights_bytes({"embed": (3, 5), "norm.weight": (4,)}, ranks=2, bytes_per_number=2)
    {'join': 24}
    """
    return {"join": _count_part(shapes.values(), ranks) * bytes_per_number}


def _count_part(shapes: Iterable[tuple[int, ...]], ranks: int) -> int:
    """Returns the numbers that a rank has of parameters with these shapes, with the padding of uneven parts.

    A parameter is cut along its first axis, or along the second where the first has the two rows of gate and up.
    """
    total = 0
    for shape in shapes:
        axis = int(len(shape) > 1 and shape[0] == 2)
        total += -(-shape[axis] // ranks) * math.prod(shape) // shape[axis]
    return total
