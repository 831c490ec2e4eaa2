"""Token weights and tallies of metrics, by hand."""

from __future__ import annotations

import pytest
import torch

from cohort.algos import build_algorithm
from cohort.algos.aggregate import Lengths, Totals, token_weights
from cohort.algos.tally import Tally
from cohort.config.schema import GRPO, DrGRPO
from cohort.serialize import dumps, loads
from cohort.world import World

# two samples in the loss, of 1 and 3 tokens, every token with the loss 6 (first sample) or 2 (second)
LENGTHS = torch.tensor([1, 3, 3, 3])
LOSSES = torch.tensor([6.0, 2.0, 2.0, 2.0], dtype=torch.float64)


def weigh(lengths, mode, num_tokens=4, num_samples=2, num_prompts=1, group=None):
    """Returns the token weights for samples of these lengths. Without `group` all are of one group with 4 tokens."""
    sizes = Lengths(sample=lengths, group=torch.full_like(lengths, 4) if group is None else group)
    totals = Totals(num_tokens=num_tokens, num_samples=num_samples, num_prompts=num_prompts)
    return token_weights(sizes, mode, totals, max_tokens=8)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token", (6 + 2 + 2 + 2) / 4),
        ("sequence", (6 / 1 + 6 / 3) / 2),
        ("prompt", (6 + 2 + 2 + 2) / 4),  # both are of one group
        ("constant", (6 / 8 + 6 / 8) / 2),
    ],
)
def test_means_by_hand(mode, expected: float) -> None:
    weights = weigh(LENGTHS, mode)
    assert weights.dtype == torch.float64
    assert (weights * LOSSES).sum().item() == pytest.approx(expected, abs=1e-15)


def test_the_denominators_are_the_given_ones_not_the_local_ones() -> None:
    half = weigh(LENGTHS, "token", num_tokens=8, num_samples=4)
    assert half.tolist() == [0.125] * 4
    half = weigh(LENGTHS, "sequence", num_tokens=8, num_samples=4)
    assert half.tolist() == pytest.approx([1 / 4, 1 / 12, 1 / 12, 1 / 12])


@pytest.mark.parametrize("mode", ["token", "sequence", "prompt", "constant"])
def test_nothing_to_weigh_divides_nothing(mode) -> None:
    assert weigh(torch.tensor([0]), mode, 0, 0, 0).tolist() == [0.0]
    none = torch.zeros(0, dtype=torch.int64)
    assert weigh(none, mode, 0, 0, 0).tolist() == []


def test_a_prompt_counts_once_however_many_tokens_its_samples_have() -> None:
    """One group has two samples of 1 and 3 tokens, the other a single token with the loss 10."""
    lengths, group = torch.tensor([1, 3, 3, 3, 1]), torch.tensor([4, 4, 4, 4, 1])
    weights = weigh(lengths, "prompt", num_tokens=5, num_samples=3, num_prompts=2, group=group)
    losses = torch.tensor([6.0, 2.0, 2.0, 2.0, 10.0], dtype=torch.float64)
    assert (weights * losses).sum().item() == pytest.approx((12 / 4 + 10) / 2)


def test_algorithms_weigh_as_configured() -> None:
    lengths = Lengths(sample=torch.tensor([2, 4]), group=torch.tensor([6, 6]))
    totals = Totals(num_tokens=8, num_samples=2, num_prompts=1)
    assert build_algorithm(GRPO(), 8).weigh_tokens(lengths, totals).tolist() == [0.25, 0.125]
    assert build_algorithm(GRPO(aggregate="token"), 8).weigh_tokens(lengths, totals).tolist() == [0.125, 0.125]
    assert build_algorithm(DrGRPO(), 8).weigh_tokens(lengths, totals).tolist() == [0.0625, 0.0625]


def tallies() -> tuple[Tally, Tally]:
    """Returns two tallies with the same names."""
    a = Tally().add_mean("m", torch.tensor([1.0, 2.0])).add_sum("s", 3.0)
    a.add_minimum("lo", torch.tensor([4.0, -1.0])).add_maximum("hi", torch.tensor([4.0, -1.0]))
    b = Tally().add_mean("m", torch.tensor([6.0])).add_sum("s", torch.tensor([1.0, 1.0]))
    b.add_minimum("lo", torch.tensor([0.0])).add_maximum("hi", torch.tensor([9.0]))
    return a, b


def test_a_tally_merges() -> None:
    a, b = tallies()
    assert a.to_metrics() == {"hi": 4.0, "lo": -1.0, "m": 1.5, "s": 3.0}
    assert b.merge(a) is b
    assert b.to_metrics() == {"hi": 9.0, "lo": -1.0, "m": 3.0, "s": 5.0}
    assert Tally().merge(b).to_metrics() == b.to_metrics()


class Ranks(World):
    """This rank and others, which send the given tallies."""

    def __init__(self, *others: Tally) -> None:
        self.others, self.size = others, 1 + len(others)

    def gather(self, value):
        return [loads(dumps(part)) for part in (value, *(other._to_lists() for other in self.others))]


def test_a_tally_over_ranks_is_the_merged_one() -> None:
    """That holds too where a rank counted nothing, or a name that no other rank counted."""
    a, b = tallies()
    sums, maxima = a.state()
    # Minima are negated maxima.
    assert sums.tolist() == [3.0, 2.0, 3.0] and maxima.tolist() == [4.0, 1.0]
    alone = Tally().add_mean("own", 7.0)
    found = a.merge_ranks(Ranks(b, Tally(), alone)).to_metrics()
    assert found == a.merge(b).merge(alone).to_metrics() and found["own"] == 7.0


def test_nothing_counted_is_left_out_and_changes_nothing() -> None:
    nothing = torch.zeros(0)
    empty = Tally().add_mean("m", nothing).add_minimum("lo", nothing).add_maximum("hi", nothing).add_sum("s", nothing)
    assert empty.to_metrics() == {"s": 0.0}
    a, _ = tallies()
    before = a.to_metrics()
    assert a.merge(empty).to_metrics() == before
    assert [v.numel() for v in empty.state()] == [v.numel() for v in a.state()]


def test_a_tally_takes_floats_and_keeps_no_graph() -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    tally = Tally().add_mean("m", 1.0).add_mean("m", x).add_sum("s", x).add_maximum("hi", x).add_minimum("lo", 0.5)
    assert not any(v.requires_grad for v in tally.state())
    assert tally.to_metrics() == pytest.approx({"hi": 3.0, "lo": 0.5, "m": 5 / 3, "s": 4.0})


def test_means_are_exact_in_low_precision() -> None:
    values = torch.full((4096,), 1.001, dtype=torch.bfloat16)
    assert Tally().add_mean("m", values).to_metrics()["m"] == values[0].item()
