"""The clipped loss: values, gradients and metrics worked out by hand, and equal sums however the tokens are cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cohort.algos import build_algorithm
from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.inputs import LossInputs
from cohort.algos.tally import Tally
from cohort.config.algo_sections import KLConfig
from cohort.config.schema import GRPO


def grpo(kl: float = 0.0, kl_estimator: str = "k3", **settings: float) -> Callable[[LossInputs], tuple[Tensor, Tally]]:
    """Returns the loss function of GRPO with these settings."""
    return build_algorithm(GRPO(kl=KLConfig(weight=kl, estimator=kl_estimator), **settings), 8).loss


def vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make(
    logprobs: list[float],
    advantages: list[float],
    *,
    old: list[float] | None = None,
    ref: list[float] | None = None,
    sampler: list[float] | None = None,
    entropy: list[float] | None = None,
    weights: list[float] | None = None,
) -> LossInputs:
    """Returns inputs of one sample per token. Without `sampler` the sampler agrees with the policy."""
    size = len(logprobs)
    return LossInputs(
        logprobs=vector(logprobs).requires_grad_(),
        entropy=vector(entropy or [0.0] * size).requires_grad_(),
        old_logprobs=None if old is None else vector(old),
        ref_logprobs=None if ref is None else vector(ref),
        sampler_logprobs=vector(sampler or logprobs),
        advantages=vector(advantages),
        weights=vector(weights or [1.0] * size),
        segments=torch.arange(size),
    )


def grads(loss: Tensor, inputs: LossInputs) -> list[float]:
    """Returns the gradient of the loss on the log-probabilities."""
    return torch.autograd.grad(loss, inputs.logprobs)[0].tolist()


# With clip 0.2 / 0.28 a token of positive advantage is clipped at ratio 1.28, one of negative advantage at 0.8. In the
# other two corners the minimum takes the unclipped side.
RATIOS = [1.5, 1.5, 0.5, 0.5, 1.1]
ADVANTAGES = [1.0, -1.0, 1.0, -1.0, 2.0]
TERMS = [-1.28, 1.5, -0.5, 0.8, -2.2]
# Where a token is not clipped, d(-r A) / d logprob = -r A.
GRADS = [0.0, 1.5, -0.5, 0.0, -2.2]


def corners(weights: list[float] | None = None) -> LossInputs:
    """Returns five tokens with the ratios and advantages above."""
    return make([math.log(r) - 1.0 for r in RATIOS], ADVANTAGES, old=[-1.0] * 5, weights=weights)


def test_clip_low_and_high_by_hand() -> None:
    inputs = corners()
    loss, tally = grpo(clip_low=0.2, clip_high=0.28)(inputs)
    assert loss.item() == pytest.approx(sum(TERMS), abs=1e-14)
    assert grads(loss, inputs) == pytest.approx(GRADS, abs=1e-14)
    metrics = tally.to_metrics()
    assert metrics["clip/low"] == 0.2 and metrics["clip/high"] == 0.2  # one token of five each
    assert metrics["ratio/min"] == pytest.approx(0.5) and metrics["ratio/max"] == pytest.approx(1.5)
    assert metrics["ratio/mean"] == pytest.approx(5.1 / 5)
    assert metrics["advantage/abs"] == pytest.approx(6 / 5)
    assert metrics["kl/old"] == pytest.approx(sum(r - 1 - math.log(r) for r in RATIOS) / 5)
    assert metrics["tokens"] == 5.0


def test_weights_multiply_the_terms() -> None:
    weights = [0.5, 0.25, 0.125, 2.0, 1.0]
    inputs = corners(weights)
    loss, _ = grpo(clip_low=0.2, clip_high=0.28)(inputs)
    assert loss.item() == pytest.approx(sum(w * t for w, t in zip(weights, TERMS, strict=True)), abs=1e-14)
    expected = [w * g for w, g in zip(weights, GRADS, strict=True)]
    assert grads(loss, inputs) == pytest.approx(expected, abs=1e-14)


def test_without_old_logprobs_the_ratio_is_exactly_one() -> None:
    inputs = make([-0.3, -7.7, -1e-3], [1.0, -2.0, 0.5])
    loss, tally = grpo(clip_low=0.2, clip_high=0.2)(inputs)
    assert loss.item() == -1.0 + 2.0 - 0.5
    assert grads(loss, inputs) == [-1.0, 2.0, -0.5]
    metrics = tally.to_metrics()
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0
    assert metrics["kl/old"] == metrics["clip/low"] == metrics["clip/high"] == 0.0


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    # d = logprob - ref = 0.5: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1.0 - math.exp(-0.5))],
)
def test_kl_in_the_loss_by_hand(estimator, value: float, slope: float) -> None:
    inputs = make([-1.0], [0.0], ref=[-1.5], weights=[0.5])
    loss, tally = grpo(clip_low=0.2, clip_high=0.2, kl=0.1, kl_estimator=estimator)(inputs)
    assert loss.item() == pytest.approx(0.5 * 0.1 * value, abs=1e-15)
    assert grads(loss, inputs) == pytest.approx([0.5 * 0.1 * slope], abs=1e-15)
    assert tally.to_metrics()["kl/ref"] == pytest.approx(value)
    assert tally.to_metrics()["loss/kl"] == pytest.approx(loss.item())


def test_k3_keeps_its_digits_near_zero() -> None:
    inputs = make([-1.0], [0.0], ref=[-1.0 - 1e-6])
    loss, _ = grpo(clip_low=0.2, clip_high=0.2, kl=1.0, kl_estimator="k3")(inputs)
    assert abs(loss.item() - 5e-13) < 1e-18
    assert abs(math.exp(-1e-6) - 1.0 + 1e-6 - 5e-13) > 1e-17  # written without expm1


def test_entropy_bonus_by_hand() -> None:
    inputs = make([-1.0, -1.0], [0.0, 0.0], entropy=[2.0, 3.0], weights=[0.5, 0.25])
    loss, tally = grpo(clip_low=0.2, clip_high=0.2, entropy=0.01)(inputs)
    assert loss.item() == pytest.approx(-0.01 * (1.0 + 0.75), abs=1e-16)
    assert torch.autograd.grad(loss, inputs.entropy)[0].tolist() == pytest.approx([-0.005, -0.0025])
    assert tally.to_metrics()["entropy"] == 2.5
    assert tally.to_metrics()["loss/entropy"] == pytest.approx(loss.item())


def test_the_sampler_gap_is_against_the_logprobs_at_rollout_time() -> None:
    inputs = make([-5.0, -5.0], [1.0, 1.0], old=[-1.0, -2.0], sampler=[-1.1, -2.3])
    metrics = grpo(clip_low=0.2, clip_high=0.2)(inputs)[1].to_metrics()
    assert metrics["sampler_gap/mean"] == pytest.approx(0.2)
    assert metrics["sampler_gap/max"] == pytest.approx(0.3)
    first = make([-1.0, -2.0], [1.0, 1.0], sampler=[-1.1, -2.3])
    metrics = grpo(clip_low=0.2, clip_high=0.2)(first)[1].to_metrics()
    assert metrics["sampler_gap/mean"] == pytest.approx(0.2)


def test_the_sampler_never_enters_the_loss() -> None:
    losses = [
        grpo(clip_low=0.2, clip_high=0.2)(make([-1.0], [1.0], old=[-1.1], sampler=[s]))[0].item() for s in (-1.0, -9.0)
    ]
    assert losses[0] == losses[1]


def test_tokens_without_weight_are_out_even_when_infinite() -> None:
    inputs = make([-1.0, 0.0], [1.0, -1.0], old=[-1.0, -1e6], weights=[0.5, 0.0])  # ratio e^1000000
    loss, tally = grpo(clip_low=0.2, clip_high=0.2)(inputs)
    assert loss.item() == -0.5
    assert grads(loss, inputs) == [-0.5, 0.0]
    assert tally.to_metrics()["ratio/max"] == 1.0 and tally.to_metrics()["tokens"] == 1.0


def test_no_tokens_give_zero_and_a_gradient() -> None:
    inputs = make([-1.0], [1.0], weights=[0.0])
    loss, tally = grpo(clip_low=0.2, clip_high=0.2)(inputs)
    assert loss.item() == 0.0 and grads(loss, inputs) == [0.0]
    assert tally.to_metrics() == {"loss": 0.0, "loss/policy": 0.0, "tokens": 0.0}


def test_a_constant_group_has_exactly_zero_gradient() -> None:
    inputs = make([-1.0, -2.0], [0.0, 0.0], old=[-1.3, -1.6])
    loss, _ = build_algorithm(GRPO(), 8).loss(inputs)
    assert grads(loss, inputs) == [0.0, 0.0]


def test_kl_without_reference_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="ref_logprobs"):
        grpo(clip_low=0.2, clip_high=0.2, kl=0.1)(make([-1.0], [1.0]))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 40), max_size=6), shuffle=st.booleans())
def test_any_partition_of_the_tokens_gives_the_same_total(seed: int, cuts: list[int], shuffle: bool) -> None:
    rng = torch.Generator().manual_seed(seed)
    size = 40

    def draw(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(size, generator=rng, dtype=torch.float64)

    logprobs = -draw().abs()
    lengths = torch.randint(1, 9, (size,), generator=rng)
    algo = build_algorithm(GRPO(kl=KLConfig(weight=0.05), entropy=0.01, clip_high=0.28), 8)
    totals = Totals(num_tokens=size, num_samples=10, num_prompts=2)
    whole = LossInputs(
        logprobs=logprobs.clone().requires_grad_(),
        entropy=draw().abs().requires_grad_(),
        old_logprobs=logprobs + draw(0.3),
        ref_logprobs=logprobs + draw(0.3),
        sampler_logprobs=logprobs + draw(0.01),
        advantages=draw(),
        weights=algo.weigh_tokens(Lengths(sample=lengths, group=lengths), totals) * (torch.arange(size) % 7 != 0),
        segments=torch.arange(size),
    )
    total, tally = algo.loss(whole)
    total_grad = torch.autograd.grad(total, [whole.logprobs, whole.entropy])

    order = torch.randperm(size, generator=rng) if shuffle else torch.arange(size)
    edges = [0, *sorted(cuts), size]
    sums, merged = [], Tally()
    for a, b in itertools.pairwise(edges):  # empty parts too
        vectors = {
            f.name: getattr(whole, f.name) for f in fields(LossInputs) if isinstance(getattr(whole, f.name), Tensor)
        }
        part = {name: vector[order[a:b]] for name, vector in vectors.items()}
        loss, metrics = algo.loss(LossInputs(**part))
        sums.append(loss)
        merged.merge(metrics)
    added = torch.stack(sums).sum()
    assert abs((added - total).item()) < 1e-12
    added_grad = torch.autograd.grad(added, [whole.logprobs, whole.entropy])
    for ours, theirs in zip(added_grad, total_grad, strict=True):
        assert (ours - theirs).abs().max() < 1e-12
    assert merged.to_metrics() == pytest.approx(tally.to_metrics(), abs=1e-12)
