"""Slices of a decoder: where they are cut, what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from cohort.errors import ConfigError
from cohort.models.auto import AutoDecoder
from cohort.models.shapes import SHAPES, find_shape
from cohort.models.tensor import TensorDecoder, check_divisible, cut_slice, find_edges, load_full, shard_decoder
from cohort.world import World
from tests.helpers.decoders_and_groups import small_config, small_decoder


class LoneRank(World):
    """A rank whose partners are not there. It cuts slices and must not call collectives."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


EVERYTHING = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": True, "tied": False}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_side_by_side_are_the_parameter(size):
    decoder = small_decoder(num_kv_heads=4, num_heads=12, **EVERYTHING)
    ranks = [dict(shard_decoder(decoder, LoneRank(rank, size)).named_parameters()) for rank in range(size)]
    axes = {"embed": 0, "head": 0, "qkv": 0, "qkv_bias": 0, "out": 1, "gate_up": 1, "gate_up_bias": 1, "down": 1}
    assert [list(slices) for slices in ranks] == [[name for name, _ in decoder.named_parameters()]] * size
    for name, full in decoder.named_parameters():
        slices = [own[name] for own in ranks]
        axis = axes.get(name.split(".")[-1])
        if axis is None:
            assert all(torch.equal(own, full) for own in slices), name
        else:
            assert torch.equal(torch.cat(slices, axis), full), name
        assert all(own.is_contiguous() and own.data_ptr() != full.data_ptr() for own in slices)


def test_a_slice_has_type_options_and_frozen_parameters_of_its_decoder():
    decoder = small_decoder(torch.bfloat16)
    decoder.recompute = True
    decoder.embed.requires_grad_(False)
    sharded = shard_decoder(decoder, LoneRank(1, 2))
    assert sharded.recompute and {p.dtype for p in sharded.parameters()} == {torch.bfloat16}
    assert not sharded.embed.requires_grad and sharded.norm.weight.requires_grad
    assert sharded.inv_freq.dtype == torch.float32 and torch.equal(sharded.inv_freq, decoder.inv_freq)
    assert sharded.config == decoder.config
    assert sharded.replicated == {n for n, _ in decoder.named_parameters() if n.endswith("norm.weight")}


@pytest.mark.parametrize(("size", "ranks"), [(151_936, 2), (49_152, 2), (512, 2), (61, 4), (7, 7)])
def test_every_token_is_on_exactly_one_rank(size, ranks):
    edges = find_edges(size, ranks)
    lengths = [stop - start for start, stop in pairwise(edges)]
    assert edges[0] == 0 and edges[-1] == size and max(lengths) - min(lengths) <= 1
    config = small_config(vocab_size=size, num_kv_heads=ranks, num_heads=ranks, ff=8 * ranks, hidden=8)
    found = []
    for rank in range(ranks):
        span = TensorDecoder(config, LoneRank(rank, ranks)).vocabulary
        rows, is_own = span.locate(torch.arange(size))
        assert int(rows.min()) == 0 and int(rows.max()) == span.stop - span.start - 1 < span.largest
        found += torch.arange(size)[is_own].tolist()
        assert torch.equal(rows[is_own], torch.arange(span.stop - span.start))
    assert found == list(range(size))


def test_full_tensors_are_loaded_into_slices():
    first, second = small_decoder(seed=0, **EVERYTHING), small_decoder(seed=1, **EVERYTHING)
    sharded = shard_decoder(first, LoneRank(1, 2))
    load_full(sharded, second.named_parameters())
    expected = dict(second.named_parameters())
    for name, own in sharded.named_parameters():
        assert torch.equal(own, cut_slice(name, expected[name], LoneRank(1, 2)))
    load_full(sharded, [("embed", first.embed)], lambda name, param: None)
    assert torch.equal(sharded.embed, cut_slice("embed", second.embed, LoneRank(1, 2)))


@pytest.mark.parametrize("changes", [{"num_kv_heads": 3, "num_heads": 6}, {"ff": 41}])
def test_sizes_that_cannot_be_divided_are_refused(changes):
    config = small_config(**changes)
    with pytest.raises(ConfigError) as refused:
        TensorDecoder(config, LoneRank(0, 2))
    message = str(refused.value)
    numbers = f"learner.tensor = 2 does not divide the model's {config.num_kv_heads} KV heads and {config.ff} "
    assert message.startswith(numbers) and "--learner.tensor" in message and "\n" not in message


def test_the_refusal_names_what_would_work():
    with pytest.raises(ConfigError, match=r"use one of 1, 2, 4 \("):
        check_divisible(small_config(num_kv_heads=4, num_heads=4), 3)


def test_well_known_shapes_can_be_divided_as_their_heads_allow():
    for name in SHAPES:
        config = find_shape(name)
        num_ranks = 3 if name == "smollm2-135m" else 2
        check_divisible(config, num_ranks)
        with torch.device("meta"):
            slices = [TensorDecoder(config, LoneRank(rank, num_ranks)) for rank in range(num_ranks)]
        common = sum(p.numel() for n, p in slices[0].named_parameters() if n in slices[0].replicated)
        sizes = [sum(p.numel() for p in s.parameters()) for s in slices]
        assert sum(sizes) - (num_ranks - 1) * common == config.num_weights and common < config.num_weights / 100


def test_a_model_of_transformers_is_refused():
    foreign = AutoDecoder.__new__(AutoDecoder)
    with pytest.raises(ConfigError, match=r"learner\.tensor = 2 needs .* --learner\.tensor 1") as refused:
        shard_decoder(foreign, LoneRank(0, 2))
    assert "\n" not in str(refused.value)


def test_no_rank_has_all_logits():
    with pytest.raises(NotImplementedError):
        shard_decoder(small_decoder(), LoneRank(0, 2)).logits(torch.zeros(1, 32))
