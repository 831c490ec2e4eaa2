"""Pairs from a reward: which samples of a group are compared, and what becomes of the others."""

from __future__ import annotations

from typing import Any

import pytest

from cohort.algos import build_algorithm
from cohort.algos.account import count_fates
from cohort.algos.algorithm import algorithm_from_record
from cohort.algos.pairing import PairedAlgorithm
from cohort.config.algos import ALGOS, GRPO, OnlineDPO, OnlineORPO, OnlineSimPO, PairPolicy, Policy, algorithm
from cohort.config.preferences import PAIR_LOSSES
from cohort.data.pack import make_batch
from cohort.errors import ConfigError
from cohort.fates import Fate
from cohort.serialize import dumps, loads
from cohort.types import Finish, Group, Provenance, Sample
from tests.helpers.decoders_and_groups import make_group, make_sample


def scored(reward: float | None, **values: Any) -> Sample:
    return make_sample([5, 6, 7], reward=reward, **{"sampler_logprobs": [-1.0] * 3, **values})


def cut(reward: float) -> Sample:
    return scored(reward, finish=Finish.LENGTH)


def failed() -> Sample:
    return scored(None, failure="the worker died")


def empty(reward: float) -> Sample:
    return make_sample([5], [Provenance.FORCED], reward=reward)


def form(*samples: Sample, id: str = "", **settings: Any) -> Group:
    [group] = build_algorithm(OnlineDPO(**settings), 16).advantages([make_group([3, 4], list(samples), id=id)])
    return group


def pair_of(group: Group) -> tuple[int, int] | None:
    """Returns (better, worse) of a group, after a look at the masks of its samples."""
    if group.excluded:
        assert not any(s.advantage for s in group.samples)
        return None
    better = [i for i, s in enumerate(group.samples) if s.advantage == 1.0]
    worse = [i for i, s in enumerate(group.samples) if s.advantage == -1.0]
    others = [s for s in group.samples if s.advantage == 0.0]
    assert len(better) == len(worse) == 1 and len(others) == len(group.samples) - 2
    assert all(s.masked for s in others) and not group.samples[better[0]].masked and not group.samples[worse[0]].masked
    return better[0], worse[0]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((0.2, 1.0, 0.0, 0.5), (1, 2)),
        ((0.0, 1.0, 0.0, 1.0), (1, 0)),  # of equal ones the first
        ((1.0, 0.0), (0, 1)),
        ((-1.0, -0.5, -3.0), (1, 2)),
    ],
)
def test_the_best_is_compared_with_the_worst(rewards: tuple[float, ...], expected: tuple[int, int]) -> None:
    assert pair_of(form(*map(scored, rewards))) == expected


@pytest.mark.parametrize(
    ("samples", "settings", "expected", "fate"),
    [
        ([scored(0.5), scored(0.5), scored(0.5)], {}, None, Fate.EQUAL_REWARDS),
        ([scored(0.1 + 0.2), scored(0.1 + 0.2)], {}, None, Fate.EQUAL_REWARDS),
        ([scored(1.0)], {}, None, Fate.TOO_FEW),
        ([failed(), scored(1.0), failed()], {}, None, Fate.TOO_FEW),
        ([failed(), failed()], {}, None, Fate.TOO_FEW),
        ([failed(), scored(0.0), scored(1.0)], {}, (2, 1), Fate.TRAINED),
        # A sample without a sampled token has nothing to compare.
        ([empty(0.0), scored(1.0)], {}, None, Fate.TOO_FEW),
        ([empty(0.0), scored(0.5), scored(1.0)], {}, (2, 1), Fate.TRAINED),
        ([cut(0.0), scored(0.5), scored(1.0)], {}, (2, 0), Fate.TRAINED),
        ([cut(0.0), scored(0.5), scored(1.0)], {"truncated": "mask"}, (2, 1), Fate.TRAINED),
        ([cut(0.0), scored(1.0)], {"truncated": "mask"}, None, Fate.TOO_FEW),
        ([cut(0.0), scored(1.0), scored(1.0)], {"truncated": "mask"}, None, Fate.EQUAL_REWARDS),
        ([cut(1.0), scored(0.5), scored(0.2)], {"truncated": "penalize"}, (1, 0), Fate.TRAINED),
        ([cut(-1.0), scored(-0.5), scored(0.0)], {"truncated": "penalize"}, (2, 0), Fate.TRAINED),
    ],
)
def test_what_cannot_be_compared_is_left_out_by_a_rule(
    samples: list[Sample], settings: dict[str, str], expected: tuple[int, int] | None, fate: Fate
) -> None:
    for refills in (False, True):
        config = OnlineDPO(**settings, dead="refill" if refills else "drop")  # type: ignore[arg-type]
        group = make_group([3, 4], samples)
        # A group is replaced exactly if it would have no pair.
        assert build_algorithm(config, 16).accept(group) == (not refills or fate is Fate.TRAINED)
    group = form(*samples, **settings)
    assert pair_of(group) == expected and group.excluded is fate


def test_every_sample_is_counted() -> None:
    samples = [scored(1.0), scored(0.0), scored(0.5), failed(), cut(0.0), empty(1.0)]
    groups = [form(*samples, truncated="mask"), form(scored(1.0), scored(1.0)), form(scored(1.0), failed())]
    counts = count_fates(groups)
    assert {name: counts[name] for name in counts if name not in ("groups", "samples")} == {
        "groups/in_loss": 1.0,
        "groups/equal_rewards": 1.0,
        "groups/too_few_scored_samples": 1.0,
        "samples/masked_in_no_pair": 2.0,  # the one in between, and the empty one
        "samples/masked_failed": 2.0,
        "samples/masked_truncated": 1.0,
        "samples/length": 1.0,
        "samples/empty": 1.0,
    }
    batch = make_batch(groups, whole_groups=True)
    [pairs] = batch.counts
    # The mean is over pairs: groups without one are in no denominator.
    assert pairs.num_prompts == 1 and pairs.num_tokens == 6 and pairs.num_first_tokens == 3
    assert [id.sample for id in batch.ids] == [0, 1]


def test_the_better_sample_comes_first_in_a_batch() -> None:
    groups = [form(*map(scored, rewards), id=str(n)) for n, rewards in enumerate([(0.0, 0.5, 1.0), (1.0, 0.5, 0.0)])]
    batch = make_batch(groups, whole_groups=True)
    assert [(id.prompt, id.sample) for id in batch.ids] == [("0", 2), ("0", 0), ("1", 0), ("1", 2)]


def test_a_random_pair_differs_in_reward_and_depends_on_the_prompt_and_its_visit_alone() -> None:
    rewards = (0.0, 1.0, 0.5, 0.5, 1.0)
    seen = set()
    for id in map(str, range(60)):
        pairs = {pair_of(form(*map(scored, rewards), id=id, pairs="random")) for _ in range(2)}
        assert len(pairs) == 1
        [pair] = pairs
        assert pair is not None and rewards[pair[0]] > rewards[pair[1]]
        seen |= pairs
    # 0 and 1, 0 and 4, 0 and 2, 0 and 3, 2 and 1, 2 and 4, 3 and 1, 3 and 4.
    assert len(seen) == 8
    algo = build_algorithm(OnlineDPO(pairs="random"), 16)
    drawn = set()
    for visit in range(12):
        group = make_group([3], list(map(scored, rewards)), id="7")
        group.prompt.visit = visit
        drawn.add(pair_of(algo.advantages([group])[0]))
    assert len(drawn) > 1


def test_a_second_call_decides_anew_and_keeps_what_others_decided() -> None:
    algo = build_algorithm(OnlineDPO(), 16)
    group = make_group([3], [scored(0.0), scored(0.5), scored(1.0)])
    assert pair_of(algo.advantages([group])[0]) == (2, 0)
    group.samples[0].reward = 2.0
    assert pair_of(algo.advantages([group])[0]) == (0, 1)
    group.excluded = Fate.NOT_ACCEPTED
    assert algo.advantages([group])[0].excluded is Fate.NOT_ACCEPTED and not any(s.advantage for s in group.samples)


def test_only_losses_with_a_reference_ask_for_it_and_only_for_the_pairs() -> None:
    for config in (OnlineDPO(), OnlineSimPO(), OnlineORPO()):
        algo = build_algorithm(config, 16)
        assert algo.needs() == frozenset()
        assert algo.loss_needs() == ({"ref"} if isinstance(config, OnlineDPO) else frozenset())
    assert build_algorithm(GRPO(), 16).loss_needs() == frozenset()


def test_every_loss_on_pairs_has_an_algorithm_with_its_settings() -> None:
    online = {name: cls for name, cls in ALGOS.items() if issubclass(cls, PairPolicy)}
    losses = {next(loss for loss in PAIR_LOSSES.values() if issubclass(cls, loss)) for cls in online.values()}
    assert losses == set(PAIR_LOSSES.values()) and len(online) == len(losses)
    for cls in online.values():
        config = cls()
        algo = algorithm_from_record(loads(dumps(build_algorithm(config, 16).to_record())))
        assert isinstance(algo, PairedAlgorithm) and algo.config == config
        [loss] = [loss() for loss in PAIR_LOSSES.values() if isinstance(config, loss)]
        assert all(getattr(config, name) == value for name, value in vars(loss).items())


def test_an_algorithm_of_a_user_inherits_the_pairs_and_may_have_no_policy_loss() -> None:
    try:
        own = algorithm("own_pairs")(type("OwnPairs", (OnlineDPO,), {"__annotations__": {}}))
        assert isinstance(build_algorithm(own(), 16), PairedAlgorithm)
        lossy = algorithm("own_lossy")(type("Lossy", (OnlineDPO,), {"policy_loss": lambda self, tokens: None}))
        with pytest.raises(ConfigError, match="policy_loss of Lossy would never be called: remove the method"):
            build_algorithm(lossy(), 16)
    finally:
        for name in ("own_pairs", "own_lossy"):
            ALGOS.pop(name, None)


def test_settings_of_policy_gradients_do_not_exist() -> None:
    assert isinstance(OnlineDPO(), Policy)
    for name in ("baseline", "scale", "aggregate", "entropy", "kl", "correction"):
        with pytest.raises(TypeError, match=name):
            OnlineDPO(**{name: getattr(OnlineDPO(), name)})
