"""Pairs of answers: packing, sharing and microbatches change neither the loss nor the gradient of any loss on pairs.

Pairs from a reward train exactly as the same pairs do when they are given.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cohort.algos.aggregate import Totals
from cohort.algos.algorithm import build_algorithm
from cohort.algos.inputs import LossInputs
from cohort.algos.preferences import PreferenceLoss
from cohort.config.algos import OnlineDPO, OnlineHinge, OnlineIPO, OnlineORPO, OnlineRobust, OnlineSimPO, PairPolicy
from cohort.config.preferences import IPO, ORPO, Hinge, PairLoss, Robust, Sigmoid, SimPO
from cohort.config.schema import LearnerConfig, OptimConfig
from cohort.data.pack import make_batch, pack
from cohort.errors import ConfigError
from cohort.inspect.explain.effect import compute_step_effect
from cohort.learner.base import MicrobatchOptions
from cohort.learner.local import LocalLearner
from cohort.loops.dpo import make_pair_batch
from cohort.loops.learning import annotate
from cohort.loops.rl import update_policy
from cohort.types import Finish, Group, Provenance
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


# ---- pairs from a reward

ONLINE = [
    OnlineDPO(nll=0.3, label_smoothing=0.1),
    OnlineDPO(length_normalize=True, truncated="mask"),
    OnlineIPO(pairs="random"),
    OnlineHinge(beta=0.01),
    OnlineRobust(truncated="penalize"),
    OnlineSimPO(),
    OnlineORPO(),
]


def make_scored_groups(num: int = 6, seed: int = 5) -> list[Group]:
    """Returns groups as a rollout leaves them: with tokens of the environment, failures, cut samples, a dead group."""
    rng = random.Random(seed)
    groups = []
    for n in range(num):
        samples = []
        for _ in range(4):
            tokens = [rng.randrange(61) for _ in range(rng.randint(2, 9))]
            marks = [Provenance.SAMPLED] * len(tokens)
            if len(tokens) > 4:
                marks[2] = E
            drawn = [rng.uniform(-4, -1) if mark == Provenance.SAMPLED else 0.0 for mark in marks]
            reward = 0.0 if n == 2 else rng.choice((0.0, 0.25, 0.5, 1.0))
            finish = rng.choice((Finish.STOP, Finish.STOP, Finish.LENGTH))
            samples.append(make_sample(tokens, marks, sampler_logprobs=drawn, reward=reward, finish=finish))
        samples[0].reward, samples[3].reward = (0.0, 0.0 if n == 2 else 1.0)
        groups.append(make_group([rng.randrange(61) for _ in range(rng.randint(3, 9))], samples, id=str(n)))
    groups[4].samples[1].failure, groups[4].samples[1].reward = "the worker died", None
    return groups


def give_pairs(groups: list[Group]) -> list[Group]:
    """Returns the pairs of groups with advantages as given pairs: two samples, the better one first, all targets."""
    given = []
    for group in groups:
        better = [s for s in group.samples if s.advantage == 1.0]
        worse = [s for s in group.samples if s.advantage == -1.0]
        if better:
            answers = [
                make_sample(s.tokens, [T if p == Provenance.SAMPLED else p for p in s.provenance])
                for s in (*better, *worse)
            ]
            given.append(make_group(group.prompt.tokens, answers, id=group.prompt.id))
    return given


@pytest.mark.parametrize("config", ONLINE, ids=lambda c: type(c).__name__)
def test_pairs_from_a_reward_train_as_given_pairs_do(config: PairPolicy) -> None:
    """The gradient is that of the DPO job: the same learner, reference and loss on the pairs alone."""
    settings = LearnerConfig(dtype="float64", token_budget=60)

    def make() -> LocalLearner:
        reference = small_decoder(torch.float64, seed=1) if config.has_reference else None
        decoder = small_decoder(torch.float64)
        return LocalLearner(decoder, settings, OptimConfig(), num_updates=1, reference=reference)

    learner, algo = make(), build_algorithm(config, 16)
    groups = algo.advantages(make_scored_groups())
    annotate(learner, groups, algo.loss_needs())
    found = learner.compute_gradient(make_batch(groups, whole_groups=algo.whole_groups), algo)
    given, job_learner, loss = give_pairs(groups), make(), PreferenceLoss(config)
    assert 4 <= len(given) < len(groups)
    annotate(job_learner, given, loss.needs(given), T)
    expected = job_learner.compute_gradient(make_pair_batch(given), loss)
    assert expected.tensors.keys() == found.tensors.keys()
    for name, gradient in expected.tensors.items():
        assert gradient.any() and (found.tensors[name] - gradient).abs().max() <= 1e-10, name
    renamed = {name.replace("reward/", "implicit/"): value for name, value in expected.metrics.items()}
    assert renamed == pytest.approx({name: found.metrics[name] for name in renamed}, abs=1e-10)
    # Only samples of pairs have log-probabilities of the reference.
    annotated = [s.ref_logprobs is not None for g in groups for s in g.samples]
    paired = [bool(s.advantage) for g in groups for s in g.samples]
    assert annotated == (paired if config.has_reference else [False] * len(paired))


@pytest.mark.parametrize("config", ONLINE, ids=lambda c: type(c).__name__)
def test_the_cut_of_a_batch_does_not_change_pairs_from_a_reward(config: PairPolicy) -> None:
    algo, reference = build_algorithm(config, 16), small_decoder(torch.float64, seed=1)
    gradients = []
    for sharing in (True, False):
        for budget, backwards in ((1, False), (60, True), (1000, False)):
            settings = LearnerConfig(dtype="float64", prefix_sharing=sharing)
            decoder = small_decoder(torch.float64)
            learner = LocalLearner(decoder, settings, OptimConfig(), num_updates=1, reference=reference)
            groups = algo.advantages(make_scored_groups())
            annotate(learner, groups, algo.loss_needs())
            turned = [replace(g, samples=g.samples[::-1]) for g in groups[::-1]] if backwards else groups
            options = MicrobatchOptions(token_budget=budget, backwards=backwards)
            gradients.append(learner.compute_gradient(make_batch(turned, whole_groups=True), algo, options))
    for other in gradients[1:]:
        assert other.metrics == pytest.approx(gradients[0].metrics, abs=1e-10)
        for name, gradient in gradients[0].tensors.items():
            assert (other.tensors[name] - gradient).abs().max() <= 1e-10, name


@pytest.mark.parametrize("config", ONLINE, ids=lambda c: type(c).__name__)
def test_only_sampled_tokens_of_pairs_have_a_gradient_and_explain_shows_it(config: PairPolicy) -> None:
    learner = make_learner(sharing=True)
    learner.reference = small_decoder(torch.float64, seed=1)
    algo = build_algorithm(config, 16)
    groups, _ = update_policy(learner, algo, make_scored_groups(), LearnerConfig(dtype="float64"))
    effect = compute_step_effect(groups, algo)
    assert effect.has_exact_ratios
    for group, row in zip(groups, effect.groups, strict=True):
        for sample, seen in zip(group.samples, row, strict=True):
            trained = [bool(g) for g in seen.gradient]
            assert trained == [bool(sample.advantage) and p == Provenance.SAMPLED for p in sample.provenance]
            # An update goes against the gradient: the better sample becomes more likely.
            assert all(g * sample.advantage < 0 for g in seen.gradient if g)
    # The sum is that of the learner, which computed it from the model.
    fresh = make_learner(sharing=True)
    fresh.reference = small_decoder(torch.float64, seed=1)
    _, stats = update_policy(fresh, algo, make_scored_groups(), LearnerConfig(dtype="float64"))
    assert effect.signal == pytest.approx(stats.metrics["signal"], rel=1e-9)
