"""Credit per turn in conversations: returns, baselines and fates by hand, and where it equals credit per episode."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace

import pytest

from cohort.algos import algorithm_names, build_algorithm
from cohort.algos.credit import CreditRule, find_turns
from cohort.algos.policy import PlainAlgorithm, PolicyGradient
from cohort.config.algo_sections import CreditConfig, KLConfig
from cohort.config.algos import ALGOS, DAPO, RLOO, DrGRPO, Policy, Reinforce, ReinforcePP
from cohort.config.schema import GRPO
from cohort.errors import TaskError
from cohort.fates import Fate
from cohort.loops.reuse import reset_sample
from cohort.loops.stats import compute_step_stats
from cohort.run.job import make_step_record
from cohort.run.store.rollouts import load_rollouts, save_rollouts
from cohort.serialize import dumps, loads
from cohort.types import Finish, Group, Provenance, Sample
from tests.helpers.decoders_and_groups import make_group, make_sample

S, E = Provenance.SAMPLED, Provenance.ENVIRONMENT
TURN = CreditConfig(per="turn")
HALF = CreditConfig(per="turn", discount=0.5)
BUILT_IN = [name for name in algorithm_names() if ALGOS[name].__module__.startswith("cohort.")]


def talk(*rewards: float, tokens: int = 2, **values) -> Sample:
    """Returns a sample with a turn of `tokens` tokens per reward, and one token of the environment between turns."""
    marks = [mark for _ in rewards for mark in (*[S] * tokens, E)][:-1]
    values = {"reward": sum(rewards), "turn_rewards": list(rewards), **values}
    return make_sample([5] * len(marks), marks, **values)


def graded(config: Policy, *samples: Sample) -> Group:
    """Returns a group of these samples after `advantages`."""
    return build_algorithm(config, 16).advantages([make_group([1], list(samples))])[0]


def by_turn(sample: Sample) -> list[float]:
    """Returns the advantage of each turn as the learner sees it; all tokens of a turn must have the same one."""
    values = sample.token_advantages or [sample.advantage] * len(sample.tokens)
    turns = [{values[place] for place in turn} for turn in find_turns(sample.provenance)]
    assert all(len(turn) == 1 for turn in turns)
    return [turn.pop() for turn in turns]


# ---- by hand -----------------------------------------------------------------------------------------------------


def test_a_worked_example() -> None:
    """Discount 0.5. Returns: [1 + 0.5 x 0, 0], [0 + 0.5 x 2, 2] and [0]; means 2/3 and 1."""
    group = graded(DrGRPO(credit=HALF), talk(1.0, 0.0), talk(0.0, 2.0), talk(0.0))
    first, second, third = group.samples
    assert first.token_advantages == pytest.approx([1 / 3, 1 / 3, 0.0, -1.0, -1.0], abs=1e-15)
    assert second.token_advantages == pytest.approx([1 / 3, 1 / 3, 0.0, 1.0, 1.0], abs=1e-15)
    assert first.token_advantages[2] == 0.0
    # A sample of one turn has one advantage. Elsewhere `advantage` is the one of the largest size.
    assert third.token_advantages is None and third.advantage == pytest.approx(-2 / 3)
    assert (first.advantage, second.advantage, group.excluded) == (-1.0, 1.0, "")


def test_the_scale_is_that_of_the_turn() -> None:
    group = graded(GRPO(credit=HALF), talk(1.0, 0.0), talk(0.0, 2.0), talk(0.0))
    stds = [math.sqrt(1 / 3) + 1e-4, math.sqrt(2) + 1e-4]
    assert by_turn(group.samples[0]) == pytest.approx([1 / 3 / stds[0], -1 / stds[1]], abs=1e-15)
    assert by_turn(group.samples[2]) == pytest.approx([-2 / 3 / stds[0]], abs=1e-15)


def test_leave_one_out_compares_with_the_others_in_the_turn() -> None:
    group = graded(RLOO(credit=TURN), talk(0.0, 1.0), talk(0.0, 0.0), talk(0.0, 0.5), talk(2.0))
    assert by_turn(group.samples[0]) == pytest.approx([1.0 - 2.5 / 3, 1.0 - 0.25])
    assert by_turn(group.samples[3]) == pytest.approx([2.0 - 0.5])


def test_a_baseline_of_the_batch_takes_the_turn_of_all_groups() -> None:
    groups = [make_group([1], [talk(0.0, 1.0), talk(1.0)]), make_group([1], [talk(0.0, 4.0), talk(0.0, 1.0, 5.0)])]
    build_algorithm(Reinforce(credit=TURN), 16).advantages(groups)
    # Returns of turn 1: 1, 1, 4, 6; of turn 2: 1, 4, 6; only one sample has a turn 3.
    found = [by_turn(s) for g in groups for s in g.samples]
    assert found[0] == pytest.approx([-2.0, 1 - 11 / 3]) and found[1] == [-2.0]
    assert found[2] == pytest.approx([1.0, 4 - 11 / 3]) and found[3] == pytest.approx([3.0, 6 - 11 / 3, 0.0])


def test_without_a_baseline_advantages_are_returns() -> None:
    group = graded(Reinforce(baseline="none", credit=HALF), talk(1.0, 0.0, 4.0), talk(3.0))
    assert by_turn(group.samples[0]) == [2.0, 2.0, 4.0] and by_turn(group.samples[1]) == [3.0]


def test_a_turn_that_one_sample_reached_has_no_advantage() -> None:
    group = graded(DrGRPO(credit=TURN), talk(1.0, 0.0, 1.0), talk(0.0, 1.0), talk(0.0))
    assert by_turn(group.samples[0]) == [1.0, 0.0, 0.0] and by_turn(group.samples[1]) == [0.0, 0.0]
    # Only the first turn of the first sample did better than the others in the same turn.
    assert [s.advantage for s in group.samples] == [1.0, 0.0, -1.0]


def test_a_scale_of_the_batch_leaves_out_turns_without_a_baseline() -> None:
    """The second turn of the second group is that of one sample: its return of 9 is in no deviation."""
    groups = [make_group([1], [talk(0.0, 1.0), talk(0.0, 0.0)]), make_group([1], [talk(0.0, 9.0), talk(0.0)])]
    build_algorithm(GRPO(scale="batch", credit=TURN), 16).advantages(groups)
    assert by_turn(groups[0].samples[0])[1] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4), abs=1e-15)
    assert by_turn(groups[1].samples[0])[1] == 0.0 and by_turn(groups[1].samples[0])[0] > 0


def test_samples_without_rewards_of_turns_have_their_reward_in_the_last_turn() -> None:
    given = graded(DrGRPO(credit=HALF), talk(0.0, 0.0, 1.0), talk(0.0, 0.5), talk(0.0))
    whole = graded(
        DrGRPO(credit=HALF), *(replace(reset_sample(s), turn_rewards=[]) for s in copy.deepcopy(given.samples))
    )
    assert [by_turn(s) for s in whole.samples] == [by_turn(s) for s in given.samples]
    assert by_turn(given.samples[0])[1] == 0.0  # 0.5 and 0.5


# ---- penalties ---------------------------------------------------------------------------------------------------


def returns(config: Policy, sample: Sample, max_tokens: int = 16) -> list[float]:
    algo = build_algorithm(config, max_tokens)
    assert isinstance(algo, PolicyGradient)
    return algo.compute_returns(sample)


def test_a_truncated_sample_has_at_most_0_in_its_last_turn() -> None:
    config = DrGRPO(truncated="penalize", credit=TURN)
    assert returns(config, talk(1.0, 0.5, finish=Finish.LENGTH)) == [1.0, 0.0]
    assert returns(config, talk(1.0, 0.5)) == [1.5, 0.5]
    assert returns(config, talk(1.0, -0.5, finish=Finish.TOTAL)) == [0.5, -0.5]
    assert returns(DrGRPO(truncated="penalize"), talk(1.0, 0.5, finish=Finish.LENGTH)) == [0.0]


def test_the_length_penalty_is_that_of_the_whole_sample_in_its_last_turn() -> None:
    # 8 sampled tokens of 10, the last half counts: a penalty of 0.6.
    config = DAPO(overlong=0.5, credit=HALF)
    assert returns(config, talk(1.0, 2.0, tokens=4), 10) == pytest.approx([1.0 + 0.5 * 1.4, 1.4])
    assert returns(config, talk(1.0, 2.0, finish=Finish.LENGTH), 10) == [1.5, 1.0]


def test_every_turn_pays_for_its_own_kl() -> None:
    sample = talk(0.0, 1.0, tokens=1, old_logprobs=[-1.0, 0.0, -2.0], ref_logprobs=[-1.5, -9.0, -2.25])
    kl = KLConfig(weight=0.1, place="reward", estimator="k1")
    assert returns(GRPO(kl=kl, credit=HALF), sample) == pytest.approx([-0.05 + 0.5 * 0.975, 0.975])
    assert returns(GRPO(kl=kl), sample) == pytest.approx([1.0 - 0.075])
    # The learner computes no log-probabilities for a sample without tokens.
    assert returns(GRPO(kl=kl, credit=HALF), make_sample([], [], reward=0.5)) == [0.5]


# ---- fates -------------------------------------------------------------------------------------------------------


def test_a_group_is_dead_only_if_every_turn_is() -> None:
    """Both samples have the reward 1. The first turn cannot tell them apart, the second can."""
    pair = make_group([1], [talk(1.0, 0.0), talk(0.0, 1.0)])
    for per, accepted in (("episode", False), ("turn", True)):
        algo = build_algorithm(DAPO(overlong=0.0, credit=CreditConfig(per=per)), 16)
        assert algo.accept(pair) is accepted
        fate = {True: Fate.TRAINED, False: Fate.CONSTANT_REWARD}[accepted]
        assert algo.advantages([copy.deepcopy(pair)])[0].excluded == fate
        dropped = graded(DrGRPO(dead="drop", credit=CreditConfig(per=per)), *copy.deepcopy(pair.samples))
        assert dropped.excluded == (Fate.TRAINED if accepted else Fate.EQUAL_REWARDS)
        dead = compute_step_stats([pair], {}, credit=algo.credit).metrics["groups/dead"]
        assert dead == float(not accepted)
    assert by_turn(graded(DrGRPO(credit=TURN), *pair.samples).samples[0]) == [0.0, -0.5]


def test_equal_turns_and_turns_that_one_sample_reached_are_dead() -> None:
    samples = [talk(0.5, 0.5), talk(1.0), talk(1.0)]
    group = graded(DrGRPO(credit=TURN), *samples)
    assert group.excluded == Fate.CONSTANT_REWARD and not any(s.advantage for s in group.samples)
    assert graded(DrGRPO(credit=TURN, dead="drop"), *samples).excluded == Fate.EQUAL_REWARDS
    assert not build_algorithm(DAPO(credit=TURN), 16).accept(group)
    assert CreditRule(by_turn=True).is_dead(group)
    # With a discount the same rewards come at other times.
    assert graded(DrGRPO(credit=HALF), *samples).excluded == Fate.TRAINED
    assert build_algorithm(DAPO(credit=HALF), 16).accept(group)


def test_failed_masked_and_too_few_samples() -> None:
    lost = talk(1.0, 1.0, failure="worker died", reward=None, turn_rewards=[])
    group = graded(
        DrGRPO(credit=TURN, truncated="mask"), lost, talk(0.0, 1.0, finish=Finish.LENGTH), talk(0.0, 0.0), talk(0.0)
    )
    assert by_turn(group.samples[0]) == [0.0, 0.0] and group.samples[0].masked == Fate.FAILED
    # The masked sample stays in the baselines of its turns; the failed one does not.
    assert by_turn(group.samples[1]) == pytest.approx([2 / 3, 0.5]) and group.samples[1].masked == Fate.TRUNCATED
    assert graded(DrGRPO(credit=TURN), lost, talk(0.0, 1.0)).excluded == Fate.TOO_FEW


def test_a_sample_without_tokens_counts_in_the_first_turn() -> None:
    empty = make_sample([], [], reward=0.0)
    for values in ([], [0.0]):
        group = graded(DrGRPO(credit=TURN), replace(empty, turn_rewards=values), talk(0.0, 1.0), talk(0.0, 0.0))
        assert [s.advantage for s in group.samples] == pytest.approx([-1 / 3, 2 / 3, -0.5])


def test_advantages_that_cancel_out_are_still_a_signal() -> None:
    """Whoever asks whether a sample has an advantage reads `advantage`, so it must not be a mean."""
    group = graded(DrGRPO(credit=TURN), talk(2.0, -1.0), talk(-1.0, 1.0))
    assert [by_turn(s) for s in group.samples] == [[0.5, -1.0], [-0.5, 1.0]]
    group = graded(DrGRPO(credit=TURN), talk(2.0, -1.0), talk(-2.0, 1.0))
    assert [by_turn(s) for s in group.samples] == [[1.0, -1.0], [-1.0, 1.0]]
    assert all(s.advantage for s in group.samples) and make_step_record(0, [group], {}).has_signal


def test_rewards_of_another_number_of_turns_are_refused() -> None:
    with pytest.raises(TaskError, match="a sample has 1 rewards of turns, but the policy wrote 2 turns"):
        graded(DrGRPO(credit=TURN), talk(0.0, 1.0, turn_rewards=[1.0]), talk(1.0))
    assert graded(DrGRPO(), talk(0.0, 1.0, turn_rewards=[1.0]), talk(0.0)).excluded == ""


def test_grading_again_per_episode_forgets_the_turns() -> None:
    group = graded(DrGRPO(credit=TURN), talk(1.0, 0.0), talk(0.0, 2.0))
    assert all(s.token_advantages for s in group.samples)
    again = build_algorithm(DrGRPO(), 16).advantages([group])[0]
    assert [(s.advantage, s.token_advantages) for s in again.samples] == [(-0.5, None), (0.5, None)]


# ---- equal to credit per episode ---------------------------------------------------------------------------------


def random_sample(rng: random.Random, rewards: list[float]) -> Sample:
    """Returns a sample with these rewards of its turns, perhaps truncated or failed."""
    tokens = rng.randint(1, 3)
    num = len(rewards) * (tokens + 1) - 1
    sample = talk(*rewards, tokens=tokens, finish=rng.choice((Finish.STOP, Finish.LENGTH)))
    for name in ("sampler_logprobs", "old_logprobs", "ref_logprobs"):
        setattr(sample, name, [rng.uniform(-3, 0) for _ in range(num)])
    if rng.random() < 0.15:
        sample.failure, sample.reward, sample.turn_rewards = "worker died", None, []
    elif rng.random() < 0.3:
        sample.turn_rewards = []
    return sample


def random_step(rng: random.Random, num_turns: int) -> list[Group]:
    """Returns groups whose samples have `num_turns` turns, with a reward only in the last one."""
    values = (0.0, 1.0, 0.3, -0.7)
    groups = []
    for _ in range(5):
        size, dead = rng.randint(1, 5), rng.random() < 0.2
        rewards = [0.3 if dead else rng.choice(values) for _ in range(size)]
        groups.append(make_group([1], [random_sample(rng, [0.0] * (num_turns - 1) + [r]) for r in rewards]))
    return groups


def settings_of(name: str, rng: random.Random, num_turns: int) -> Policy:
    """Returns a config of the algorithm with random settings that change returns and fates."""
    config = replace(
        ALGOS[name](),
        truncated=rng.choice(("keep", "mask", "penalize")),
        kl=KLConfig(weight=rng.choice((0.0, 0.1)), place="reward") if num_turns == 1 else KLConfig(),
    )
    return replace(config, dead=rng.choice(("keep", "drop", "refill"))) if config.needs_siblings else config


@pytest.mark.parametrize("num_turns", [1, 3])
@pytest.mark.parametrize("name", BUILT_IN)
def test_turns_equal_episodes_bit_for_bit(name: str, num_turns: int) -> None:
    """With one turn; and with a reward in the last turn only, if nobody stops earlier and nothing is discounted."""
    credit = CreditConfig(per="turn", discount=0.3 if num_turns == 1 else 1.0)
    fates = set()
    for seed in range(30):
        rng = random.Random(seed)
        config = settings_of(name, rng, num_turns)
        whole, turns = (build_algorithm(c, 16) for c in (config, replace(config, credit=credit)))
        groups = random_step(rng, num_turns)
        assert [whole.accept(g) for g in groups] == [turns.accept(g) for g in groups]
        expected = whole.advantages(copy.deepcopy(groups))
        got = turns.advantages(copy.deepcopy(groups))
        assert got == expected and all(s.token_advantages is None for g in got for s in g.samples)
        dead = [compute_step_stats(g, {}, credit=a.credit).metrics for g, a in ((expected, whole), (got, turns))]
        assert dead[0] == dead[1]
        fates |= {g.excluded for g in got}
    assert {Fate.TRAINED} < fates or not ALGOS[name]().needs_siblings


# ---- stored and sent ---------------------------------------------------------------------------------------------


def test_an_algorithm_keeps_its_credit_when_it_is_sent() -> None:
    algo = build_algorithm(ReinforcePP(credit=HALF), 16)
    plain = loads(dumps(algo.to_record()))
    assert isinstance(plain, PlainAlgorithm) and plain.config == algo.to_record().config
    assert build_algorithm(plain.config, plain.max_tokens).credit == CreditRule(by_turn=True, discount=0.5)
    assert algo.advantage_description == "baseline = batch, scale = centred, credit per turn with discount 0.5"


def test_stored_rollouts_give_the_same_advantages_again(tmp_path) -> None:
    groups = [graded(GRPO(credit=HALF), talk(0.1, 0.7), talk(0.3, 0.2, 0.9), talk(0.0, 0.6, 1.0))]
    save_rollouts(tmp_path / "step-000001.safetensors", groups)
    stored = load_rollouts(tmp_path / "step-000001.safetensors")
    assert stored == groups and stored[0].samples[0].turn_rewards == [0.1, 0.7]
    again = [replace(g, samples=[reset_sample(s) for s in g.samples]) for g in stored]
    assert again != groups and build_algorithm(GRPO(credit=HALF), 16).advantages(again) == groups
