"""What must hold of every registered algorithm, over random groups, lengths, masks and policies."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cohort.algos import algorithm_names, build_algorithm
from cohort.algos.aggregate import Lengths, Totals
from cohort.algos.algorithm import Algorithm
from cohort.algos.inputs import LossInputs
from cohort.algos.tally import Tally
from cohort.config.algo_sections import CorrectionConfig, CreditConfig, KLConfig
from cohort.config.algos import ALGOS, Policy
from cohort.data.batch import Microbatch, Minibatch
from cohort.types import Finish, Group, Provenance, Sample
from tests.helpers.decoders_and_groups import make_group, make_sample, pack_groups

LONGEST = 12
AGGREGATES = ("token", "sequence", "prompt", "constant")
CORRECTIONS = (
    CorrectionConfig(),
    CorrectionConfig(kind="truncate"),
    CorrectionConfig(kind="mask", level="sequence", bounds=(0.3, 3.0)),
    CorrectionConfig(kind="truncate", level="geometric", bounds=(0.5, 2.0)),
)


def settings_of(name: str, rng: random.Random) -> Policy:
    """Returns a config of the algorithm with random settings."""
    config = ALGOS[name]()
    kl = KLConfig(weight=rng.choice((0.0, 0.1)), estimator=rng.choice(("k1", "k2", "k3", "abs")))
    return replace(
        config,
        aggregate=rng.choice(AGGREGATES),
        truncated=rng.choice(("keep", "mask", "penalize")),
        dead=rng.choice(("keep", "drop")),
        entropy=rng.choice((0.0, 0.01)),
        kl=replace(kl, to=rng.choice(("reference", "sampler"))),
        correction=rng.choice(CORRECTIONS),
        credit=CreditConfig(per="episode" if config.no_turn_credit else rng.choice(("episode", "turn")), discount=0.9),
    )


def drawn_sample(rng: random.Random) -> Sample:
    """Returns a random sample, perhaps empty, truncated or failed, with environment tokens in it."""
    n = rng.randint(0, LONGEST)
    marks = [rng.choice((Provenance.SAMPLED,) * 4 + (Provenance.ENVIRONMENT,)) for _ in range(n)]

    def policy(spread: float) -> list[float]:
        return [-1.0 + rng.gauss(0, spread) for _ in range(n)]

    return make_sample(
        [rng.randint(3, 60) for _ in range(n)],
        marks,
        reward=rng.choice((0.0, 1.0, 0.3)),
        finish=rng.choice((Finish.STOP, Finish.LENGTH)),
        failure=rng.choice(("", "", "", "", "lost")),
        sampler_logprobs=policy(0.3),
        old_logprobs=policy(0.3),
        ref_logprobs=policy(0.3),
        versions=[(0, rng.randint(0, 5))],
    )


def drawn(seed: int) -> list[Group]:
    """Returns groups of unequal sizes, some dead, some with failures, of several policy versions."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 5))]
    return [
        make_group([3] * rng.randint(1, 6), [drawn_sample(rng) for _ in range(n)], id=str(i))
        for i, n in enumerate(sizes)
    ]


class Policies:
    """The current policy of every sample's tokens, as leaves: what a model would have given."""

    def __init__(self, groups: list[Group], seed: int) -> None:
        # Sorted, so that values do not depend on the order of the groups.
        ordered = sorted(groups, key=lambda g: g.prompt.id)
        rng = torch.Generator().manual_seed(seed)
        self.logprobs = {id(s): self._leaf(len(s.tokens), rng) for g in ordered for s in g.samples}
        self.entropy = {id(s): self._leaf(len(s.tokens), rng) for g in ordered for s in g.samples}

    @staticmethod
    def _leaf(n: int, rng: torch.Generator) -> Tensor:
        return (-1.0 + 0.3 * torch.randn(n, generator=rng, dtype=torch.float64)).requires_grad_()

    def inputs(self, micro: Microbatch, samples: list[Sample], weights: Tensor) -> LossInputs:
        owners = [samples[s] for s in dict.fromkeys(micro.segments.tolist())]
        at = {id(s): torch.tensor([i for i, p in enumerate(s.provenance) if p == Provenance.SAMPLED]) for s in owners}
        values = {
            name: torch.cat([leaf[id(s)].index_select(0, at[id(s)]) for s in owners])
            for name, leaf in (("logprobs", self.logprobs), ("entropy", self.entropy))
        }
        fixed = {
            n: getattr(micro, n) for n in ("old_logprobs", "ref_logprobs", "sampler_logprobs", "advantages", "segments")
        }
        return LossInputs(**values, **fixed, weights=weights)


def total(
    algo: Algorithm, groups: list[Group], seed: int, budget: int, share: bool, pieces: int = 1
) -> tuple[Tensor, Policies, Tally]:
    """Returns the loss of one optimizer step, its variables and its metrics.

    It is computed in microbatches and, where the algorithm allows, in smaller pieces.
    """
    policies, batch = Policies(groups, seed), pack_groups(groups, budget, share=share)
    [minibatch] = batch.minibatches
    by_id = {id: s for g in groups for id, s in zip(g.ids(), g.samples, strict=True)}
    samples = [by_id[id] for id in batch.batch.ids]
    loss, tally = torch.zeros((), dtype=torch.float64), Tally()
    for micro in minibatch.microbatches:
        weights = algo.weigh_tokens(Lengths(sample=micro.lengths, group=micro.group_lengths), totals(minibatch))
        whole = policies.inputs(micro, samples, weights)
        for part in cut(whole, pieces if algo.per_token else 1):
            value, metrics = algo.loss(part)
            loss = loss + value
            tally.merge(metrics)
    return loss, policies, tally


def totals(minibatch: Minibatch) -> Totals:
    return Totals(
        num_tokens=minibatch.counts.num_tokens,
        num_samples=minibatch.counts.num_samples,
        num_prompts=minibatch.counts.num_prompts,
    )


def cut(x: LossInputs, pieces: int) -> list[LossInputs]:
    """Returns the inputs cut into pieces of neighbouring tokens."""
    if pieces == 1:
        return [x]
    names = [n for n in x.__slots__ if isinstance(getattr(x, n), Tensor)]
    parts = [torch.tensor_split(getattr(x, n), pieces) for n in names]
    return [replace(x, **dict(zip(names, part, strict=True))) for part in zip(*parts, strict=True)]


def gradients(loss: Tensor, policies: Policies) -> dict[int, Tensor]:
    """Returns the gradient on the log-probabilities of every sample, by `id(sample)`."""
    if not loss.requires_grad:  # nothing was packed
        return {}
    keys = list(policies.logprobs)
    found = torch.autograd.grad(loss, [policies.logprobs[k] for k in keys], allow_unused=True)
    return {k: torch.zeros_like(policies.logprobs[k]) if g is None else g for k, g in zip(keys, found, strict=True)}


def fresh(seed: int, config: Policy) -> tuple[Algorithm, list[Group]]:
    """Returns the algorithm, and random groups with advantages."""
    algo = build_algorithm(config, LONGEST)
    return algo, algo.advantages(drawn(seed))


@pytest.mark.parametrize("name", algorithm_names())
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), choice=st.integers(0, 10_000), budget=st.integers(18, 60), pieces=st.integers(1, 4))
def test_microbatches_sharing_and_order_do_not_matter(name, seed, choice, budget, pieces):
    config = settings_of(name, random.Random(choice))
    algo, groups = fresh(seed, config)
    loss, policies, tally = total(algo, groups, seed, budget=10_000, share=True)
    expected = gradients(loss, policies)
    order = random.Random(choice).sample(range(len(groups)), len(groups))
    for other, share in (([*range(len(groups))], False), (order, True)):
        turned = algo.advantages([groups[i] for i in other])
        value, again, counted = total(algo, turned, seed, budget, share, pieces)
        assert abs(float(value.detach() - loss.detach())) < 1e-10
        for key, grad in gradients(value, again).items():
            assert torch.allclose(grad, expected[key], atol=1e-10, rtol=1e-9)
        first, second = tally.to_metrics(), counted.to_metrics()
        assert first.keys() == second.keys()
        for metric, number in first.items():
            assert second[metric] == pytest.approx(number, abs=1e-9), metric


@pytest.mark.parametrize("name", algorithm_names())
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), choice=st.integers(0, 10_000))
def test_gradients_are_finite_and_only_on_sampled_tokens_of_samples_in_the_loss(name, seed, choice):
    algo, groups = fresh(seed, settings_of(name, random.Random(choice)))
    loss, policies, _ = total(algo, groups, seed, budget=10_000, share=True)
    found = gradients(loss, policies)
    for group in groups:
        for sample in group.samples:
            grad = found.get(id(sample))
            if grad is None:
                continue
            assert torch.isfinite(grad).all()
            sampled = torch.tensor([p == Provenance.SAMPLED for p in sample.provenance], dtype=torch.bool)
            assert not grad[~sampled].any()
            if group.excluded or sample.masked or sample.failure:
                assert not grad.any()


@pytest.mark.parametrize("name", algorithm_names())
def test_better_samples_are_pushed_up_and_worse_ones_down(name):
    """On-policy, every algorithm agrees on the sign."""
    config = ALGOS[name]()
    right, wrong = (make_sample([5, 6], reward=r, sampler_logprobs=[-1.0, -1.0]) for r in (1.0, 0.0))
    algo = build_algorithm(config, LONGEST)
    groups = algo.advantages(
        [make_group([3], [right, wrong], id="0"), make_group([4], [replace(right), replace(wrong)], id="1")]
    )
    loss, policies, tally = total(algo, groups, 0, budget=1000, share=True)
    found = gradients(loss, policies)
    assert (found[id(right)] < 0).all()
    assert (found[id(wrong)] > 0).all() or (name == "pass_at_k" and not found[id(wrong)].any())
    assert tally.to_metrics()["ratio/min"] == tally.to_metrics()["ratio/max"] == 1.0
