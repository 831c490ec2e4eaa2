"""Moves scored groups between ranks: to where they are trained, and to the first rank, which records them.

Each rank samples its own prompts, and some answers are longer than others. So before the update the groups are divided
anew, by tokens: the largest first, each to the rank with the fewest tokens so far, and then ranks exchange some. Every
rank computes the same division from the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from cohort.types import Group
from cohort.world import Grid, World

# Exchanges between two ranks after which a division is even enough.
MAX_EXCHANGES = 32


class GroupMover:
    """Moves groups among the ranks of `world`. In one process it changes nothing.

    `grid` says which ranks hold one model together: these get the same groups.
    """

    def __init__(self, world: World, grid: Grid | None = None) -> None:
        self.world = world
        self.grid = grid or world.split(1)
        self.metrics: dict[str, float] = {}  # of the last division: mean tokens per rank over the largest number

    def divide(self, groups: Sequence[Group], minibatches: int = 1) -> list[Group]:
        """Returns the groups that this rank trains on, out of those that all ranks pass, and sets their `order`.

        The order is that of one process: first the groups sampled in this step, by the number of their prompt, then
        reused ones, which only the first rank has. Each of the `minibatches` is divided by itself.
        """
        if self.world.size == 1:
            return list(groups)
        with self.world.phase("the division of groups"):
            orders = self._find_orders(groups)
            sizes = [count_tokens(group) for group in groups]
            listed = self.world.gather([list(pair) for pair in zip(orders, sizes, strict=True)])
            tokens = dict(sorted((order, size) for part in listed for order, size in part))
            num_rows = self.grid.data.size
            row_of = divide_evenly(list(tokens.values()), num_rows, minibatches)
            rows = dict(zip(tokens, row_of, strict=True))
            loads = [sum(tokens[order] for order in tokens if rows[order] == row) for row in range(num_rows)]
            self.metrics = {"pack/evenness": sum(loads) / len(loads) / max(*loads, 1)}
            width = self.grid.tensor.size
            sent = [[(o, g) for o, g in zip(orders, groups, strict=True) if rows[o] == row] for row in range(num_rows)]
            # The ranks of a row are neighbours, and all get what the row trains on.
            received = self.world.exchange([sent[rank // width] for rank in range(self.world.size)])
        own = sorted((pair for part in received for pair in part), key=lambda pair: pair[0])
        for order, group in own:
            group.order = order
        return [group for _, group in own]

    def select(self, groups: Sequence[Group], minibatches: int = 1) -> list[Group]:
        """Returns the groups that this rank trains on, out of groups that every rank has, and sets their `order`."""
        if self.world.size == 1:
            return list(groups)
        row_of = divide_evenly([count_tokens(group) for group in groups], self.grid.data.size, minibatches)
        own = [n for n, row in enumerate(row_of) if row == self.grid.data.rank]
        for n in own:
            groups[n].order = n
        return [groups[n] for n in own]

    def _find_orders(self, groups: Sequence[Group]) -> list[int]:
        """Returns the place of each of this rank's groups among those of all ranks, as in one process.

        Number n of the step's prompts is sampled by rank n modulo the number of ranks, and reused groups follow.
        """
        num_fresh = sum(not group.reused for group in groups)
        num_all = max(self.world.gather(num_fresh)) * self.world.size
        fresh = [i * self.world.size + self.world.rank for i in range(num_fresh)]
        return fresh + [num_all + i for i in range(len(groups) - num_fresh)]

    def collect_on_first(self, groups: list[Group]) -> list[Group]:
        """Returns the groups of all ranks in their order on the first rank, and [] on the others."""
        if self.world.size == 1:
            return groups
        with self.world.phase("the record of a step"):
            # The ranks of a row have the same groups: one of them sends.
            own = [(group.order, group) for group in groups] if self.grid.tensor.rank == 0 else []
            parts = self.world.gather_on_first(own)
        everything = sorted((pair for part in parts for pair in part), key=lambda pair: pair[0])
        return [group for _, group in everything]


def count_tokens(group: Group) -> int:
    """Returns the tokens that training on a group costs: its prompt once, and all its samples."""
    return len(group.prompt.tokens) + sum(len(sample.tokens) for sample in group.samples)


def divide_evenly(sizes: Sequence[int], parts: int, slices: int = 1) -> list[int]:
    """Returns a part, from 0 to `parts` - 1, for each of these sizes, so that the parts have similar sums.

    The largest go first, each to the part with the smallest sum; then parts exchange members while that helps. The list
    is cut into `slices` neighbouring pieces, and each piece is divided by itself: a slice is trained before the next
    one, and its parts must be even.

    >>> divide_evenly([5, 1, 1, 1, 4, 4], 2), divide_evenly([3, 3, 9, 9], 2, slices=2)
    ([0, 0, 0, 0, 1, 1], [0, 1, 0, 1])
    """
    chosen = [0] * len(sizes)
    for index in range(slices):
        members = range(len(sizes) * index // slices, len(sizes) * (index + 1) // slices)
        sums = [0] * parts
        for place in sorted(members, key=lambda n: (-sizes[n], n)):
            part = min(range(parts), key=lambda p: (sums[p], p))
            chosen[place] = part
            sums[part] += sizes[place]
        _exchange_members(sizes, members, chosen, sums)
    return chosen


def _exchange_members(sizes: Sequence[int], members: range, chosen: list[int], sums: list[int]) -> None:
    """Makes the parts of a slice more even, in place: the largest and the smallest exchange members while that helps.

    `chosen` has the part of each member, `sums` the sum of each part.
    """
    for _ in range(MAX_EXCHANGES):
        large = max(range(len(sums)), key=lambda p: (sums[p], p))
        small = min(range(len(sums)), key=lambda p: (sums[p], p))
        gap = sums[large] - sums[small]
        given = [n for n in members if chosen[n] == large]
        # None = a member goes over, and none comes back.
        taken: list[int | None] = [None, *(n for n in members if chosen[n] == small)]
        moves = [(sizes[a] - (0 if b is None else sizes[b]), a, b) for a in given for b in taken]
        helping = [move for move in moves if 0 < move[0] < gap]
        if not helping:
            return
        moved, a, b = min(helping, key=lambda move: abs(2 * move[0] - gap))
        chosen[a] = small
        if b is not None:
            chosen[b] = large
        sums[large] -= moved
        sums[small] += moved
