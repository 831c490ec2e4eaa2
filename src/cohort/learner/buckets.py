"""Sums of gradients over ranks that begin while the backward pass still runs (the setting learner.shard = none).

Gradients travel in buckets: a large matrix is a bucket of its own and is summed where it lies, and small tensors travel
together. Buckets have one order, which is the same on every rank: that in which a backward pass completes them. A rank
begins the sum of a bucket as soon as it is complete, and never before that of an earlier one. So a rank that completes
nothing before the end, because it has nothing to train on, makes the same collective calls as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cohort.world import World

# Numbers from which a bucket is large enough to travel: 1 MiB in fp32.
BUCKET_NUMBERS = 1 << 18


def make_buckets(sizes: dict[str, int]) -> list[list[str]]:
    """Returns the names of parameters in buckets, for the numbers of each by name in the order of the forward pass.

    Buckets are in the opposite order.

    >>> make_buckets({"embed": 1 << 20, "norm": 5, "bias": 6, "down": 1 << 18})
    [['down'], ['embed'], ['bias', 'norm']]
    """
    buckets: list[list[str]] = []
    small: list[str] = []
    for name in reversed(sizes):
        if sizes[name] >= BUCKET_NUMBERS:
            buckets.append([name])
            continue
        small.append(name)
        if sum(sizes[other] for other in small) >= BUCKET_NUMBERS:
            buckets.append(small)
            small = []
    return [*buckets, small] if small else buckets


class GradientBuckets:
    """One minibatch's gradients in buckets, which are summed over the ranks of `world`.

    `read` returns the gradient of a parameter by name. `buckets` must be the same on every rank. A gradient is complete
    when it has the parts of all microbatches of this rank; from then on it belongs to this object.
    """

    def __init__(self, world: World, buckets: list[list[str]], read: Callable[[str], Tensor]) -> None:
        self._world = world
        self._buckets = buckets
        self._read = read
        self.is_open = False  # whether gradients may become complete: in the backward of the last microbatch
        self._num_begun = 0  # buckets whose sums have begun
        self._waits: list[Callable[[], None]] = []
        self._complete: set[str] = set()
        self._begun: dict[str, Tensor] = {}  # gradients whose sums have begun, by parameter

    def has_begun(self, name: str) -> bool:
        """Returns whether the sum of a parameter's gradient has begun."""
        return name in self._begun

    def complete(self, name: str) -> None:
        """Notes that a parameter's gradient is complete, and begins all sums whose turn has come."""
        self._complete.add(name)
        while self._num_begun < len(self._buckets) and self._complete.issuperset(self._buckets[self._num_begun]):
            self._begin_next()

    def start_again(self) -> None:
        """Forgets what is complete and has not travelled: this rank computes its gradients once more, from zero.

        Sums that have begun are of complete gradients. They stay valid, and the other ranks already take part in them.
        """
        self.is_open = False
        self._complete.clear()

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """Begins all sums that are left, waits for all, and yields (parameter, summed gradient)."""
        while self._num_begun < len(self._buckets):
            self._begin_next()
        for wait in self._waits:
            wait()
        yield from self._begun.items()

    def _begin_next(self) -> None:
        """Begins the sum of the next bucket."""
        names = self._buckets[self._num_begun]
        grads = {name: self._read(name) for name in names}
        first = grads[names[0]]
        flat = first if len(names) == 1 else torch.cat([grad.flatten() for grad in grads.values()])
        # Noted after the call: where memory for it runs out, the sum has not begun.
        self._waits.append(self._world.begin_sum(flat))
        self._num_begun += 1
        if len(names) > 1:
            parts = flat.split([grad.numel() for grad in grads.values()])
            grads = {name: part.view(grad.shape) for part, (name, grad) in zip(parts, grads.items(), strict=True)}
        self._begun |= grads
