"""Losses on pairs: numbers worked out by hand, and metrics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.inputs import LossInputs
from cohort.algos.preferences import PreferenceLoss
from cohort.config.preferences import IPO, ORPO, PAIR_LOSSES, Hinge, PairLoss, Robust, Sigmoid, SimPO

# Two pairs: log-probabilities of the tokens of better, worse, better, worse; then the same by the reference.
POLICY = [[-1.0, -0.5], [-2.0], [-0.25], [-0.5, -0.25, -0.75]]
REFERENCE = [[-1.5, -1.0], [-1.0], [-0.25], [-1.0, -0.25, -1.25]]


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def make_inputs(has_reference: bool = True, totals: Totals | None = None) -> LossInputs:
    """Returns the two pairs as the inputs of a loss. The samples have numbers with gaps, as in a real microbatch."""
    logprobs = flat(POLICY).requires_grad_()
    segments = torch.tensor([n for n, row in zip((4, 5, 8, 9), POLICY, strict=True) for _ in row])
    ones = torch.ones_like(logprobs)
    return LossInputs(
        logprobs=logprobs,
        entropy=ones.clone().requires_grad_(),
        old_logprobs=None,
        ref_logprobs=flat(REFERENCE) if has_reference else None,
        sampler_logprobs=ones,
        advantages=ones,
        weights=0.5 * ones,
        segments=segments,
        totals=totals or Totals(num_tokens=7, num_samples=4, num_prompts=2, num_first_tokens=3),
        num_samples=4,
    )


def softplus(x: float) -> float:
    """Returns -log(sigmoid(-x))."""
    return math.log1p(math.exp(x))


# Scores as sums: policy minus reference is 1.0 and -1.0 in the first pair, 0 and 1.0 in the second.
MARGINS = (2.0, -1.0)
# Scores as means: 0.5 and -1.0, 0 and 1/3.
MEAN_MARGINS = (1.5, -1 / 3)
# Mean log-probabilities without a reference: -0.75 and -2.0, -0.25 and -0.5.
PLAIN_MARGINS = (1.25, 0.25)


def odds(mean: float) -> float:
    return math.exp(mean) / (1 - math.exp(mean))


EXPECTED: list[tuple[PairLoss, list[float]]] = [
    (Sigmoid(beta=0.5), [softplus(-0.5 * m) for m in MARGINS]),
    (Sigmoid(beta=0.5, length_normalize=True), [softplus(-0.5 * m) for m in MEAN_MARGINS]),
    (Sigmoid(beta=0.5, label_smoothing=0.2), [0.8 * softplus(-0.5 * m) + 0.2 * softplus(0.5 * m) for m in MARGINS]),
    (Hinge(beta=0.75), [0.0, 1.75]),  # 1 - 1.5 is below 0
    (IPO(beta=0.5), [(m - 1.0) ** 2 for m in MEAN_MARGINS]),
    (IPO(beta=0.5, length_normalize=False), [1.0, 4.0]),
    (
        Robust(beta=0.5, label_smoothing=0.2),
        [(0.8 * softplus(-0.5 * m) - 0.2 * softplus(0.5 * m)) / 0.6 for m in MARGINS],
    ),
    (SimPO(beta=2.0, gamma=0.5), [softplus(0.5 - 2.0 * m) for m in PLAIN_MARGINS]),
    (
        ORPO(beta=0.3, nll=0.0),
        [0.3 * softplus(-math.log(odds(a) / odds(b))) for a, b in ((-0.75, -2.0), (-0.25, -0.5))],
    ),
]


@pytest.mark.parametrize(("config", "terms"), EXPECTED, ids=lambda value: type(value).__name__)
def test_the_terms_of_two_pairs(config: PairLoss, terms: list[float]) -> None:
    loss, tally = PreferenceLoss(config).loss(make_inputs(config.has_reference))
    assert loss.item() == pytest.approx(sum(terms) / 2, abs=1e-14)
    assert tally.to_metrics()["loss"] == pytest.approx(loss.item(), abs=1e-14)


def test_every_loss_is_tested_and_has_a_name() -> None:
    assert {type(config) for config, _ in EXPECTED} == set(PAIR_LOSSES.values())


@pytest.mark.parametrize("config", [config for config, _ in EXPECTED if not isinstance(config, Hinge | IPO)])
def test_the_better_answer_is_pushed_up_and_the_worse_one_down(config: PairLoss) -> None:
    inputs = make_inputs(config.has_reference)
    [gradient] = torch.autograd.grad(PreferenceLoss(config).loss(inputs)[0], inputs.logprobs)
    assert (gradient < 0).tolist() == [True, True, False, True, False, False, False]


def test_a_margin_that_is_large_enough_is_not_enlarged() -> None:
    """The first pair has a margin of 2: above the target 1 of IPO, which pushes it back, and that of the hinge."""
    for config, signs in ((IPO(beta=0.5, length_normalize=False), [1, 1, -1, -1]), (Hinge(beta=0.75), [0, 0, 0, -1])):
        inputs = make_inputs()
        [gradient] = torch.autograd.grad(PreferenceLoss(config).loss(inputs)[0], inputs.logprobs)
        assert gradient[:4].sign().tolist() == signs


def test_imitation_is_a_mean_over_the_tokens_of_better_answers() -> None:
    plain, _ = PreferenceLoss(Sigmoid()).loss(make_inputs())
    both, tally = PreferenceLoss(Sigmoid(nll=0.2)).loss(make_inputs())
    assert (both - plain).item() == pytest.approx(0.2 * (1.0 + 0.5 + 0.25) / 3, abs=1e-14)
    assert tally.to_metrics()["loss/nll"] == pytest.approx((both - plain).item(), abs=1e-14)


def test_metrics() -> None:
    _, tally = PreferenceLoss(Sigmoid(beta=0.5)).loss(make_inputs())
    metrics = tally.to_metrics()
    expected = {
        "reward/chosen": 0.25,
        "reward/rejected": 0.0,
        "reward/margin": 0.25,
        "reward/accuracy": 0.5,
        "logprob/chosen": -0.875,
        "logprob/rejected": -1.75,
        "length/chosen": 1.5,
        "length/rejected": 2.0,
        "nll": (0.75 + 0.25) / 2,
        "tokens": 7,
        "entropy": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-14)
    d = (flat(POLICY) - flat(REFERENCE)).tolist()
    assert metrics["kl/ref"] == pytest.approx(sum(math.exp(-x) - 1 + x for x in d) / 7, abs=1e-14)


def test_a_tie_counts_half() -> None:
    inputs = make_inputs()
    same = LossInputs(**{**{f: getattr(inputs, f) for f in inputs.__slots__}, "ref_logprobs": inputs.logprobs.detach()})
    metrics = PreferenceLoss(Sigmoid()).loss(same)[1].to_metrics()
    assert (metrics["reward/accuracy"], metrics["loss"]) == (0.5, pytest.approx(math.log(2)))


def test_an_answer_that_is_certain_has_a_finite_loss_and_gradient() -> None:
    inputs = make_inputs(False)
    with torch.no_grad():
        inputs.logprobs.zero_()
    loss, _ = PreferenceLoss(ORPO()).loss(inputs)
    [gradient] = torch.autograd.grad(loss, inputs.logprobs)
    assert math.isfinite(loss.item()) and bool(gradient.isfinite().all())


def test_the_token_weights_count_pairs() -> None:
    lengths = torch.tensor([1, 4])
    totals = Totals(num_tokens=5, num_samples=8, num_prompts=4)
    weights = PreferenceLoss(Sigmoid()).weigh_tokens(Lengths(sample=lengths, group=lengths), totals)
    assert weights.tolist() == [0.25, 0.25]
