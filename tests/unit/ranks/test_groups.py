"""The division of groups among ranks, by tokens."""

from __future__ import annotations

import random

import pytest

from cohort.ranks.groups import divide_evenly


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_eight_groups_per_rank_are_even_to_within_five_percent(num_ranks: int) -> None:
    """Lengths of completions vary widely: here log-normally, as those of training do."""
    for seed in range(20):
        rng = random.Random(seed)
        sizes = [64 + sum(min(1024, int(rng.lognormvariate(5.0, 0.8))) for _ in range(8)) for _ in range(8 * num_ranks)]
        parts = divide_evenly(sizes, num_ranks)
        sums = [sum(size for size, part in zip(sizes, parts, strict=True) if part == n) for n in range(num_ranks)]
        assert sum(sums) == sum(sizes)
        assert sum(sums) / num_ranks / max(sums) > 0.95, (seed, sums)


def test_each_minibatch_is_divided_by_itself() -> None:
    sizes = [100, 1, 1, 100, 50, 50, 7, 7]
    parts = divide_evenly(sizes, 2, slices=2)
    for half in (slice(0, 4), slice(4, 8)):
        chosen = list(zip(sizes[half], parts[half], strict=True))
        sums = [sum(size for size, part in chosen if part == n) for n in (0, 1)]
        assert sums[0] == sums[1]


def test_fewer_groups_than_ranks_leave_some_ranks_without() -> None:
    assert sorted(divide_evenly([5, 5], 4)) == [0, 1] and divide_evenly([], 3) == []
