"""Buckets of gradients: their order, what happens where memory runs out, and where sums overlap with the backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cohort.config.schema import OptimConfig
from cohort.learner import buckets
from cohort.learner.buckets import GradientBuckets, make_buckets
from cohort.learner.optim import WholeOptimizer
from cohort.world import World


class TwoRanks(World):
    """A world of two ranks with equal gradients, which notes the sums. Its first `failures` run out of memory."""

    size = 2

    def __init__(self, failures: int = 0) -> None:
        super().__init__()
        self.failures = failures
        self.begun: list[list[float]] = []

    def begin_sum(self, x: Tensor) -> Callable[[], None]:
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("no memory left")
        self.begun.append(x.flatten().tolist())

        def wait() -> None:
            x.mul_(2)

        return wait


def make_gradients() -> dict[str, Tensor]:
    """Returns gradients in the order of the forward pass: "b" is large, the others travel together."""
    return {"a": torch.tensor([1.0]), "b": torch.tensor([[2.0, 3.0, 4.0]]), "c": torch.tensor([5.0, 6.0])}


def test_small_tensors_travel_together_and_large_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_NUMBERS", 10)
    assert make_buckets({"embed": 30, "one": 4, "two": 5, "big": 10, "three": 6, "last": 1}) == [
        ["big"],
        ["last", "three", "two"],
        ["embed"],
        ["one"],
    ]
    assert make_buckets({}) == []


def test_sums_begin_in_the_order_of_the_buckets_whatever_is_complete_first() -> None:
    world, grads = TwoRanks(), make_gradients()
    found = GradientBuckets(world, [["b"], ["c", "a"]], grads.__getitem__)
    found.complete("a")
    found.complete("c")
    assert world.begun == []
    found.complete("b")
    assert world.begun == [[2.0, 3.0, 4.0], [5.0, 6.0, 1.0]]
    summed = dict(found.finish())
    assert {name: grad.tolist() for name, grad in summed.items()} == {"b": [[4, 6, 8]], "c": [10, 12], "a": [2]}
    assert summed["b"] is grads["b"], "a large gradient is not copied"


def test_a_rank_that_completes_nothing_makes_the_same_sums() -> None:
    world, grads = TwoRanks(), make_gradients()
    assert len(dict(GradientBuckets(world, [["b"], ["c", "a"]], grads.__getitem__).finish())) == 3
    assert [len(sent) for sent in world.begun] == [3, 3]


def test_a_sum_without_memory_has_not_begun() -> None:
    world, grads = TwoRanks(failures=1), make_gradients()
    found = GradientBuckets(world, [["b"], ["c", "a"]], grads.__getitem__)
    with pytest.raises(torch.OutOfMemoryError):
        found.complete("b")
    assert not found.has_begun("b")
    found.start_again()
    found.complete("a")
    assert world.begun == []
    dict(found.finish())
    assert [len(sent) for sent in world.begun] == [3, 3]


class Product(nn.Module):
    """Two matrices, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.eye(2))
        self.second = nn.Parameter(2 * torch.eye(2))

    def backward(self, scale: float) -> None:
        """Adds the gradient of scale x the sum of all entries of the product."""
        (scale * (self.second @ self.first)).sum().backward()


def test_a_second_attempt_keeps_the_sums_that_have_begun_and_no_gradient_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_NUMBERS", 4)
    world, module = TwoRanks(), Product()
    optimizer = WholeOptimizer(module, OptimConfig())
    optimizer.overlaps = True
    # A microbatch that is not the last begins nothing.
    optimizer.zero_grad()
    module.backward(1.0)
    assert not world.begun
    optimizer.begin_reduce(world)

    def fail(grad: Tensor) -> None:
        raise torch.OutOfMemoryError("no memory left")

    handle = module.first.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        module.backward(1.0)
    handle.remove()
    assert world.begun == [[2.0] * 4], "the second matrix has both microbatches"
    optimizer.zero_grad()
    for is_last in (False, True):
        if is_last:
            optimizer.begin_reduce(world)
        module.backward(1.0)
        assert module.second.grad is None, "a gradient that has travelled takes memory once"
        assert optimizer.master_grad(module.second) is None
        # After the last backward the first matrix is complete, and travels too.
        assert (optimizer.master_grad(module.first) is None) == is_last
    optimizer.reduce(world)
    assert world.begun == [[2.0] * 4, [4.0] * 4]
    assert module.second.grad is not None and module.second.grad.flatten().tolist() == [4.0] * 4
    assert module.first.grad is not None and module.first.grad.flatten().tolist() == [8.0] * 4
    # The next minibatch begins from nothing.
    optimizer.zero_grad()
    module.backward(1.0)
    assert optimizer.master_grad(module.second) is not None and len(world.begun) == 2


def test_frozen_parameters_are_in_no_sum() -> None:
    world, module = TwoRanks(), Product()
    module.second.requires_grad_(False)
    optimizer = WholeOptimizer(module, OptimConfig())
    optimizer.zero_grad()
    optimizer.reduce(world)
    assert [len(sent) for sent in world.begun] == [4] and module.second.grad is None


def test_sums_overlap_with_the_backward_on_gpus() -> None:
    class OnGpu(nn.Parameter):
        is_cuda = True  # type: ignore[assignment]

    module = Product()
    assert not WholeOptimizer(module, OptimConfig()).overlaps
    module.first = OnGpu(torch.eye(2))
    assert WholeOptimizer(module, OptimConfig()).overlaps
