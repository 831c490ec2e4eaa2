"""Credit per turn reaches the loss exactly: the gradient of the learner is that of a loss written out by hand."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cohort.algos.algorithm import build_algorithm
from cohort.config.algo_sections import CreditConfig
from cohort.config.algos import CISPO, DAPO, RLOO, DrGRPO, GSPOToken, Policy
from cohort.config.schema import GRPO, LearnerConfig, OptimConfig
from cohort.data.pack import make_batch
from cohort.inspect.explain.effect import compute_step_effect
from cohort.learner.local import LocalLearner
from cohort.loops.rl import update_policy
from cohort.models.decoder import Decoder
from cohort.types import Group, Provenance
from tests.helpers.decoders_and_groups import make_group, make_sample, naive_logprobs, pack_groups, small_decoder

S, E = Provenance.SAMPLED, Provenance.ENVIRONMENT
HALF = CreditConfig(per="turn", discount=0.5)
# Returns of the turns 1 and 0, 1 and 2, 0: their means are 2/3 and 1. Two turns of two tokens, of one and three; one.
TURNS = {0: [([0, 1], 1 / 3), ([4, 5], -1.0)], 1: [([0], 1 / 3), ([2, 3, 4], 1.0)], 2: [([0, 1, 2], -2 / 3)]}


def conversations() -> list[Group]:
    """Returns the group that `TURNS` describes: its tokens, and the rewards of its turns."""
    rows = [
        ([7, 8, 9, 10, 11, 12], [S, S, E, E, S, S], [1.0, 0.0]),
        ([13, 14, 15, 16, 17], [S, E, S, S, S], [0.0, 2.0]),
        ([18, 19, 20], [S, S, S], [0.0]),
    ]
    samples = [make_sample(tokens, marks, reward=sum(r), turn_rewards=r) for tokens, marks, r in rows]
    return [make_group([3, 4, 5], samples, id="talk")]


def learner_gradient(decoder: Decoder, groups: list[Group], config: Policy, budget: int = 1000) -> dict[str, Tensor]:
    """Returns the learner's gradient of one update on these groups, which have advantages already."""
    learner = LocalLearner(decoder, LearnerConfig(token_budget=budget), OptimConfig(), num_updates=1)
    learner.forward_backward(pack_groups(groups, budget).minibatches[0], build_algorithm(config, 16))
    return {name: master.grad.clone() for name, master in learner.optimizer.masters.items()}


def written_out(decoder: Decoder, weight_of: dict[int, float]) -> dict[str, Tensor]:
    """Returns the gradient of -sum of weight x A x log p over the turns in TURNS, by autograd on all logits."""
    [group] = conversations()
    decoder.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for index, turns in TURNS.items():
        logprobs = naive_logprobs(decoder, group.prompt.tokens, group.samples[index].tokens)
        for places, advantage in turns:
            loss = loss - weight_of[index] * advantage * logprobs[places].sum()
    loss.backward()
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


# The weight of a token of each sample. The samples have 4, 4 and 3 sampled tokens.
WEIGHTS = {
    "sequence": {0: 1 / 12, 1: 1 / 12, 2: 1 / 9},
    "token": dict.fromkeys(range(3), 1 / 11),
    "constant": dict.fromkeys(range(3), 1 / (3 * 16)),
}


@pytest.mark.parametrize("budget", [1000, 9])
@pytest.mark.parametrize(
    "config",
    [
        DrGRPO(credit=HALF),
        DrGRPO(credit=HALF, aggregate="sequence"),
        GSPOToken(credit=HALF, scale="none"),
        CISPO(credit=HALF, scale="none"),
        DAPO(credit=HALF, scale="none", overlong=0.0),
    ],
    ids=lambda config: type(config).__name__,
)
def test_the_gradient_of_turns_is_that_of_a_loss_written_out(config: Policy, budget: int) -> None:
    decoder = small_decoder(torch.float64)
    groups = build_algorithm(config, 16).advantages(conversations())
    expected = written_out(small_decoder(torch.float64), WEIGHTS[config.aggregate])
    got = learner_gradient(decoder, groups, config, budget)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max() <= 1e-10, name
    # The comparison can fail: one advantage per sample gives another gradient.
    whole = build_algorithm(replace(config, credit=CreditConfig()), 16).advantages(conversations())
    other = learner_gradient(decoder, whole, config, budget)
    assert max(float((other[name] - gradient).abs().max()) for name, gradient in expected.items()) > 1e-3


def test_tokens_of_the_environment_have_exactly_no_gradient() -> None:
    config = GRPO(credit=HALF)
    algo = build_algorithm(config, 16)
    groups = algo.advantages(conversations())
    effect = compute_step_effect(groups, algo)
    for sample, found in zip(groups[0].samples, effect.groups[0], strict=True):
        sampled = [p == S for p in sample.provenance]
        assert [g != 0.0 for g in found.gradient] == sampled
        assert all(g == 0.0 for g, own in zip(found.gradient, sampled, strict=True) if not own)
    # Whatever advantage such a token has: not one bit of the gradient changes.
    strange = copy.deepcopy(groups)
    for sample in strange[0].samples:
        if sample.token_advantages is not None:
            pairs = zip(sample.provenance, sample.token_advantages, strict=True)
            sample.token_advantages = [1e6 if p == E else a for p, a in pairs]
    assert strange != groups
    decoder = small_decoder(torch.float64)
    expected, got = (learner_gradient(decoder, g, config) for g in (groups, strange))
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_the_batch_has_the_advantage_of_each_token() -> None:
    groups = build_algorithm(RLOO(credit=HALF), 16).advantages(conversations())
    batch = make_batch(groups)
    found = [row[targets].tolist() for row, targets in zip(batch.advantages, batch.targets, strict=True)]
    assert found == [pytest.approx(row) for row in ([0.5, 0.5, -2.0, -2.0], [0.5, 2.0, 2.0, 2.0], [-1.0, -1.0, -1.0])]


@pytest.mark.parametrize(("per", "is_dead"), [("episode", True), ("turn", False)])
def test_a_step_learns_from_turns_whose_rewards_add_up_to_the_same(per: str, is_dead: bool) -> None:
    rows = [([7, 8, 9], [1.0, 0.0]), ([10, 11, 12], [0.0, 1.0])]
    pair = make_group([3], [make_sample(t, [S, E, S], reward=1.0, turn_rewards=r) for t, r in rows])
    config = LearnerConfig(token_budget=40)
    learner = LocalLearner(small_decoder(torch.float64), config, OptimConfig(), num_updates=1)
    algo = build_algorithm(DrGRPO(credit=CreditConfig(per=per)), 16)
    metrics = update_policy(learner, algo, [pair], config)[1].metrics
    assert (metrics["groups/dead"], metrics["groups/in_loss"]) == (float(is_dead), float(not is_dead))
    # Two tokens of four have an advantage, of 0.5 each.
    assert metrics.get("advantage/abs") == (None if is_dead else 0.25)
