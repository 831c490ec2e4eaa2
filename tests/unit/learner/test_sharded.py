"""Places of parameters in the flat tensor that ranks divide among them."""

from __future__ import annotations

import pytest
import torch

from cohort.config.schema import OptimConfig
from cohort.learner import sharded
from cohort.learner.optim import WholeOptimizer
from cohort.learner.sharded import FlatLayout, Piece, ShardedOptimizer
from cohort.world import World
from tests.helpers.decoders_and_groups import small_decoder

SHAPES = {"norm": torch.Size([3]), "matrix": torch.Size([2, 4]), "bias": torch.Size([2]), "head": torch.Size([3, 3])}


def test_matrices_lie_before_vectors_in_their_order():
    layout = FlatLayout(SHAPES, 1)
    assert list(layout.starts.items()) == [("matrix", 0), ("head", 8), ("norm", 17), ("bias", 20)]
    assert (layout.size, layout.slice_size) == (22, 22)


def test_slices_are_equal_and_padded_at_the_end():
    layout = FlatLayout(SHAPES, 4)
    assert (layout.size, layout.slice_size) == (24, 6)
    assert layout.pieces(0) == [Piece("matrix", 0, 6, 0)]
    assert layout.pieces(1) == [Piece("matrix", 6, 8, 0), Piece("head", 0, 4, 2)]
    assert layout.pieces(2) == [Piece("head", 4, 9, 0), Piece("norm", 0, 1, 5)]
    assert layout.pieces(3) == [Piece("norm", 1, 3, 0), Piece("bias", 0, 2, 2)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 30])
def test_every_entry_is_in_one_slice(ranks):
    layout = FlatLayout(SHAPES, ranks)
    flat = torch.arange(layout.size)
    for name, shape in SHAPES.items():
        found = []
        for rank in range(ranks):
            part = flat[rank * layout.slice_size : (rank + 1) * layout.slice_size]
            for piece in (p for p in layout.pieces(rank) if p.name == name):
                found.append(part[piece.place : piece.place + piece.stop - piece.start])
        assert torch.equal(torch.cat(found).view(shape), layout.view(flat, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("joined", [1 << 24, 1000])
def test_one_slice_is_the_whole_optimizer(monkeypatch, dtype, joined):
    """In a world of one rank: the same weights and state, also where weights are gathered in small parts."""
    monkeypatch.setattr(sharded, "JOINED_NUMBERS", joined)
    world, config, results = World(), OptimConfig(lr=1e-2, weight_decay=0.1), []
    for is_sharded in (False, True):
        module = small_decoder(dtype)
        optimizer = ShardedOptimizer(module, config, world) if is_sharded else WholeOptimizer(module, config)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            optimizer.zero_grad()
            for p in module.parameters():
                grad = torch.randn(p.shape, generator=generator).to(dtype)
                p.grad = grad if p.grad is None else p.grad.add_(grad)
            optimizer.collect_grads()
            optimizer.reduce(world)
            norm = optimizer.grad_norm()
            optimizer.step(1e-2, 0.5)
        state = {name: entry.read().clone() for name, entry in optimizer.state().items()}
        results.append((dict(module.named_parameters()), state, norm))
    (weights, state, norm), (others, other_state, other_norm) = results
    assert norm == pytest.approx(other_norm, rel=1e-6) and norm > 1
    assert state.keys() == other_state.keys()
    assert all(torch.equal(t, other_state[n]) for n, t in state.items())
    assert all(torch.equal(p, others[n]) for n, p in weights.items())
