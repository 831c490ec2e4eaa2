"""Pairs of answers: packing, sharing and microbatches change neither the loss nor the gradient of any loss on pairs."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from cohort.algos.aggregate import Totals
from cohort.algos.inputs import LossInputs
from cohort.algos.preferences import PreferenceLoss
from cohort.config.preferences import IPO, ORPO, Hinge, PairLoss, Robust, Sigmoid, SimPO
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.data.pack import make_batch, pack
from cohort.errors import ConfigError
from cohort.learner.base import MicrobatchOptions
from cohort.learner.local import LocalLearner
from cohort.types import Group, Provenance
from tests.helpers.decoders_and_groups import make_group, make_sample, naive_logprobs, small_decoder

T, E = Provenance.TARGET, Provenance.ENVIRONMENT
LOSSES = [Sigmoid(nll=0.3), Sigmoid(length_normalize=True), IPO(), Hinge(beta=0.01), Robust(), SimPO(), ORPO()]


def make_pairs(num: int = 5, seed: int = 3) -> list[Group]:
    """Returns pairs of unequal lengths with reference log-probabilities. Some answers have tokens of others in them."""
    rng = random.Random(seed)
    pairs = []
    for n in range(num):
        answers = []
        for _ in range(2):
            tokens = [rng.randrange(61) for _ in range(rng.randint(2, 9))]
            marks = [T] * len(tokens)
            if len(tokens) > 4:
                marks[2] = E
            reference = [rng.uniform(-5, -3) if mark == T else 0.0 for mark in marks]
            answers.append(make_sample(tokens, marks, ref_logprobs=reference))
        pairs.append(make_group([rng.randrange(61) for _ in range(rng.randint(3, 9))], answers, id=str(n)))
    return pairs


def compute_naively(pairs: list[Group], config: PairLoss) -> tuple[float, dict[str, Tensor]]:
    """Returns loss and gradient of one pass per answer, without packing: the definition."""
    decoder = small_decoder(torch.float64)
    logprobs, reference, segments = [], [], []
    for n, sample in enumerate(s for g in pairs for s in g.samples):
        at = [i for i, mark in enumerate(sample.provenance) if mark == T]
        logprobs.append(naive_logprobs(decoder, pairs[n // 2].prompt.tokens, sample.tokens)[at])
        reference += [sample.ref_logprobs[i] for i in at]
        segments += [n] * len(at)
    ones = torch.ones(len(segments), dtype=torch.float64)
    inputs = LossInputs(
        logprobs=torch.cat(logprobs),
        entropy=ones,
        old_logprobs=None,
        ref_logprobs=torch.tensor(reference, dtype=torch.float64) if config.has_reference else None,
        sampler_logprobs=ones,
        advantages=ones,
        weights=ones,
        segments=torch.tensor(segments),
        totals=Totals(
            num_tokens=len(segments),
            num_samples=2 * len(pairs),
            num_prompts=len(pairs),
            num_first_tokens=sum(len(part) for part in logprobs[::2]),
        ),
        num_samples=2 * len(pairs),
    )
    loss, _ = PreferenceLoss(config).loss(inputs)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


def make_learner(sharing: bool) -> LocalLearner:
    config = LearnerConfig(dtype="float64", prefix_sharing=sharing)
    return LocalLearner(small_decoder(torch.float64), config, OptimConfig(), num_updates=1)


def without_reference(pairs: list[Group]) -> list[Group]:
    for group in pairs:
        for sample in group.samples:
            sample.ref_logprobs = None
    return pairs


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("config", LOSSES, ids=lambda c: type(c).__name__)
def test_loss_and_gradient_do_not_depend_on_the_packing(config: PairLoss, sharing: bool) -> None:
    pairs = make_pairs() if config.has_reference else without_reference(make_pairs())
    expected_loss, expected = compute_naively(make_pairs(), config)
    batch = make_batch(pairs, loss_on=T, whole_groups=True)
    numbers_of_microbatches = set()
    for budget in (1, 60, 100, 1000):  # 1 is raised to the longest pair
        for backwards in (False, True):
            learner = make_learner(sharing)
            options = MicrobatchOptions(token_budget=budget, backwards=backwards)
            found = learner.compute_gradient(batch, PreferenceLoss(config), options)
            assert found.metrics["loss"] == pytest.approx(expected_loss, abs=1e-10)
            largest = max(float(g.abs().max()) for g in expected.values())
            for name, gradient in expected.items():
                assert (found.tensors[name].double() - gradient).abs().max() <= 1e-10 * max(1.0, largest), name
        numbers_of_microbatches.add(len(pack(batch, max(budget, 40), sharing)[0].microbatches))
    assert len(numbers_of_microbatches) > 1


@pytest.mark.parametrize("share", [True, False])
def test_a_pair_is_never_split(share: bool) -> None:
    pairs = make_pairs(9)
    batch = make_batch(pairs, 2, loss_on=T, whole_groups=True)
    for budget in (40, 50, 80):
        for minibatch in pack(batch, budget, share):
            assert minibatch.longest_sample <= budget
            for micro in minibatch.microbatches:
                order = torch.unique_consecutive(micro.segments).tolist()
                assert len(order) == micro.num_samples
                for better, worse in zip(order[::2], order[1::2], strict=True):
                    assert worse == better + 1 and batch.group[better] == batch.group[worse]


def test_a_pair_beyond_the_budget_is_refused_with_the_numbers() -> None:
    pair = make_group([1, 2, 3], [make_sample([4] * 6, [T] * 6), make_sample([5] * 8, [T] * 8)])
    batch = make_batch([pair], loss_on=T, whole_groups=True)
    assert len(pack(batch, 17, share=True)[0].microbatches) == len(pack(batch, 20, share=False)[0].microbatches) == 1
    for budget, share, needed in ((16, True, 17), (19, False, 20)):
        message = rf"compared with each other have {needed} tokens .* exceeds the token budget of {budget} .* {needed} "
        with pytest.raises(ConfigError, match=message):
            pack(batch, budget, share)


def test_the_better_answers_tokens_are_counted() -> None:
    pairs = make_pairs(4)
    batch = make_batch(pairs, 2, loss_on=T, whole_groups=True)
    expected = [g.samples[0].provenance.count(T) for g in pairs]
    assert [c.num_first_tokens for c in batch.counts] == [sum(expected[:2]), sum(expected[2:])]
