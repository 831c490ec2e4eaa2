"""Group-relative advantages and what becomes of each sample, by hand-computed numbers."""

from __future__ import annotations

import math

import pytest

from cohort.algos import algorithm_names, build_algorithm
from cohort.algos.account import count_fates
from cohort.algos.advantages import compute_advantages, is_constant
from cohort.algos.algorithm import algorithm_name
from cohort.config.algo_sections import KLConfig
from cohort.config.algos import PairPolicy
from cohort.config.schema import ALGOS, GRPO, DrGRPO, OptimConfig
from cohort.errors import ConfigError
from cohort.fates import Fate
from cohort.types import Finish, Group, Prompt, Provenance, Sample

S, E = Provenance.SAMPLED, Provenance.ENVIRONMENT


def sample(reward: float | None, *, num_tokens: int = 2, finish: Finish = Finish.STOP, failure: str = "") -> Sample:
    return Sample(
        tokens=[7] * num_tokens,
        provenance=[int(S)] * num_tokens,
        sampler_logprobs=[-1.0] * num_tokens,
        reward=reward,
        finish=finish,
        failure=failure,
    )


def group(*samples: Sample, excluded: str = "") -> Group:
    prompt = Prompt(task="t", id="0", visit=0, row={}, messages=[], tokens=[1], provenance=[0])
    return Group(prompt=prompt, samples=list(samples), excluded=Fate(excluded))


def grade(config: GRPO, *samples: Sample) -> Group:
    """Returns a group of these samples after `advantages`."""
    return build_algorithm(config, 8).advantages([group(*samples)])[0]


def test_advantages_with_std_by_hand() -> None:
    # mean 0.25, centred 0.75 -0.25 -0.25 -0.25, sum of squares 0.75, n - 1 = 3, std 0.5
    [got] = compute_advantages([[1.0, 0.0, 0.0, 0.0]], "std")
    assert got == pytest.approx([0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001], abs=1e-15)


def test_advantages_without_std_by_hand() -> None:
    assert compute_advantages([[1.0, 0.0, 0.0, 0.0]], "none") == [[0.75, -0.25, -0.25, -0.25]]
    assert compute_advantages([[3.0, -1.0]], "none") == [[2.0, -2.0]]


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.1] * 7, [1 / 3] * 6, [0.7], [], [1e30] * 3])
def test_a_constant_group_is_exactly_zero(rewards: list[float], scale) -> None:
    assert is_constant(rewards)
    assert all(a == 0.0 for a in compute_advantages([rewards], scale)[0])


def test_a_computed_mean_of_equal_rewards_is_not_their_value() -> None:
    # why constancy is a comparison: the naive mean of three 0.1 is 0.10000000000000002
    assert 0.1 - (0.1 + 0.1 + 0.1) / 3 != 0.0
    assert compute_advantages([[0.1, 0.1, 0.1]]) == [[0.0, 0.0, 0.0]]


def test_rewards_that_differ_by_rounding_stay_small() -> None:
    assert max(map(abs, compute_advantages([[0.3, 0.1 + 0.2]])[0])) < 1e-11  # without the floor: 0.7


def test_advantages_do_not_depend_on_the_order_of_the_samples() -> None:
    # As floats, 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1.
    rewards = [0.1, 0.2, 0.3]
    [forward], [backward] = compute_advantages([rewards]), compute_advantages([rewards[::-1]])
    assert forward == backward[::-1]


def test_groups_of_unequal_size_have_their_own_baselines() -> None:
    groups = [group(sample(1.0), sample(0.0)), group(sample(3.0), sample(0.0), sample(0.0))]
    graded = build_algorithm(DrGRPO(), 8).advantages(groups)
    assert [[s.advantage for s in g.samples] for g in graded] == [[0.5, -0.5], [2.0, -1.0, -1.0]]


def test_failed_samples_leave_the_baseline() -> None:
    graded = grade(DrGRPO(), sample(1.0), sample(0.0), sample(None, failure="worker died"))
    assert [s.advantage for s in graded.samples] == [0.5, -0.5, 0.0]
    assert [s.masked for s in graded.samples] == ["", "", "failed"]
    assert graded.excluded == ""


def test_one_scored_sample_has_no_baseline() -> None:
    for config in (GRPO(), GRPO(kl=KLConfig(weight=0.1)), GRPO(entropy=0.1)):
        graded = grade(config, sample(1.0), sample(None, failure="worker died"))
        assert graded.excluded == "too few scored samples"
        assert [s.advantage for s in graded.samples] == [0.0, 0.0]


def test_a_constant_group_is_excluded_only_when_that_is_exact() -> None:
    constant = (sample(0.5), sample(0.5))
    assert grade(GRPO(), *constant).excluded == "constant reward"
    assert grade(GRPO(kl=KLConfig(weight=0.1, place="loss")), *constant).excluded == ""  # its KL has a gradient
    assert grade(GRPO(entropy=0.1), *constant).excluded == ""


def test_truncated_keep_mask_penalize() -> None:
    def cut() -> list[Sample]:
        return [sample(1.0, finish=Finish.LENGTH), sample(0.0), sample(0.5), sample(0.5)]

    keep, mask, penalize = (grade(DrGRPO(truncated=t), *cut()) for t in ("keep", "mask", "penalize"))
    assert [s.advantage for s in keep.samples] == [0.5, -0.5, 0.0, 0.0]
    # The masked sample stays in the baseline.
    assert [s.advantage for s in mask.samples] == [0.5, -0.5, 0.0, 0.0]
    assert [s.masked for s in mask.samples] == ["truncated", "", "", ""]
    assert [s.advantage for s in penalize.samples] == [-0.25, -0.25, 0.25, 0.25]
    # The task's reward stays.
    assert penalize.samples[0].reward == 1.0
    assert not any(s.masked for g in (keep, penalize) for s in g.samples)


def test_penalize_never_raises_a_reward() -> None:
    graded = grade(DrGRPO(truncated="penalize"), sample(-1.0, finish=Finish.LENGTH), sample(1.0))
    assert [s.advantage for s in graded.samples] == [-1.0, 1.0]


def test_grading_again_with_other_settings_forgets_the_first_grading() -> None:
    first = grade(DrGRPO(truncated="mask"), sample(1.0, finish=Finish.LENGTH), sample(1.0))
    assert (first.excluded, first.samples[0].masked) == ("constant reward", "truncated")
    again = build_algorithm(DrGRPO(truncated="penalize"), 8).advantages([first])[0]
    assert (again.excluded, again.samples[0].masked) == ("", "")
    assert [s.advantage for s in again.samples] == [-0.5, 0.5]


def test_a_group_excluded_elsewhere_keeps_its_reason() -> None:
    given = group(sample(1.0), sample(0.0), excluded="not accepted")
    graded = build_algorithm(GRPO(), 8).advantages([given])[0]
    assert graded.excluded == "not accepted"
    assert [s.advantage for s in graded.samples] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [("k1", 0.5 - 0.25), ("k2", (0.25 + 0.0625) / 2), ("k3", math.exp(-0.5) - 0.5 + math.exp(0.25) - 1.25)],
)
def test_kl_in_the_reward_by_hand(estimator, divergence: float) -> None:
    talker, other = sample(1.0, num_tokens=3), sample(1.0, num_tokens=1)
    # The environment's token has no KL.
    talker.provenance = [int(S), int(E), int(S)]
    talker.old_logprobs, talker.ref_logprobs = [-1.0, 0.0, -2.0], [-1.5, -9.0, -1.75]
    other.old_logprobs, other.ref_logprobs = [-1.0], [-1.0]
    config = DrGRPO(kl=KLConfig(weight=0.1, place="reward", estimator=estimator))
    graded = grade(config, talker, other)
    assert [s.advantage for s in graded.samples] == pytest.approx([-0.05 * divergence, 0.05 * divergence])
    assert graded.excluded == "" and talker.reward == 1.0


def test_an_empty_completion_is_graded_and_has_no_kl() -> None:
    empty, other = sample(0.0, num_tokens=0), sample(1.0, num_tokens=1)
    other.old_logprobs = other.ref_logprobs = [-1.0]
    graded = grade(DrGRPO(kl=KLConfig(weight=0.1, place="reward")), empty, other)
    assert [s.advantage for s in graded.samples] == [-0.5, 0.5]


def test_needs() -> None:
    def needs(config: GRPO) -> set[str]:
        return set(build_algorithm(config, 8).needs())

    assert needs(GRPO()) == set()
    assert needs(GRPO(kl=KLConfig(weight=0.1))) == {"ref"}
    assert needs(GRPO(kl=KLConfig(weight=0.1, place="reward"))) == {"old", "ref"}
    assert needs(GRPO(kl=KLConfig(weight=0.0, place="reward"))) == set()


def test_every_configured_algorithm_can_be_built() -> None:
    # Other test modules of this process register algorithms of their own.
    built_in = {name: variant for name, variant in ALGOS.items() if variant.__module__.startswith("cohort.")}
    # Those on pairs have a loss on pairs in place of a policy loss.
    on_pairs = {name for name, variant in built_in.items() if issubclass(variant, PairPolicy)}
    assert sorted(algorithm_names()) == sorted(built_in.keys() - on_pairs) and len(on_pairs) == 6
    for name, variant in built_in.items():
        built = build_algorithm(variant(), 8)
        assert algorithm_name(variant()) == name
        assert built.accept(group(sample(0.0), sample(0.0))) is (variant().dead != "refill")
        assert built.accept(group(sample(0.0), sample(1.0)))


def test_a_config_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="OptimConfig is not an algorithm config"):
        build_algorithm(OptimConfig(), 8)


def test_count_fates_counts_every_group_and_sample() -> None:
    groups = [
        group(sample(1.0, finish=Finish.LENGTH), sample(0.0), sample(None, failure="x")),
        group(sample(1.0), sample(1.0, num_tokens=0)),
        group(sample(1.0), sample(None, failure="x")),
    ]
    assert count_fates(build_algorithm(GRPO(truncated="mask"), 8).advantages(groups)) == {
        "groups": 3.0,
        "groups/in_loss": 1.0,
        "groups/constant_reward": 1.0,
        "groups/too_few_scored_samples": 1.0,
        "samples": 7.0,
        "samples/empty": 1.0,
        "samples/length": 1.0,
        "samples/masked_failed": 2.0,
        "samples/masked_truncated": 1.0,
    }
