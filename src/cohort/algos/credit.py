"""Credit in conversations: which rewards the turns of a sample answer for. Plain float64 numbers.

With credit per episode a sample has one return, which counts for all its tokens. With credit per turn it has one return
per turn. Then everything below that compares samples compares the samples that reached the same turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cohort.algos.advantages import is_constant
from cohort.config.algo_sections import CreditConfig
from cohort.errors import TaskError
from cohort.types import Group, Provenance, Sample

TurnReturns = Sequence[Sequence[Sequence[float]]]
"""One list per group, with one list per scored sample, with the return of each of its turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditRule:
    """How the reward of a sample becomes returns: one for the whole sample, or one per turn of the policy."""

    by_turn: bool = False  # False = one return per sample
    discount: float = 1.0  # factor per turn of later rewards

    @classmethod
    def from_config(cls, config: CreditConfig) -> CreditRule:
        """Returns the rule that the settings `algo.credit` describe."""
        return cls(by_turn=config.is_on, discount=config.discount)

    def find_spans(self, sample: Sample) -> list[list[int]]:
        """Returns what the sample has returns for, as the indices of the sampled tokens: each turn, or all turns.

        There is at least one, so that the reward of a sample without sampled tokens counts in baselines.
        """
        turns = find_turns(sample.provenance) or [[]]
        return turns if self.by_turn else [[place for turn in turns for place in turn]]

    def split_reward(self, sample: Sample) -> list[float]:
        """Returns the rewards of a scored sample: one per turn, or one for the whole sample.

        A sample without rewards of its turns has its reward in the last one. Raises TaskError if it has rewards for
        another number of turns than the policy wrote.
        """
        assert sample.reward is not None, "a sample is neither scored nor failed"
        if not self.by_turn:
            return [sample.reward]
        num_turns = max(1, sample.num_turns)
        if not sample.turn_rewards:
            return [0.0] * (num_turns - 1) + [sample.reward]
        if len(sample.turn_rewards) != num_turns:
            raise TaskError(
                f"a sample has {len(sample.turn_rewards)} rewards of turns, but the policy wrote {num_turns} turns. "
                "Let the environment give one reward per turn, or one for the whole episode; or set --algo.credit.per "
                "episode."
            )
        return list(sample.turn_rewards)

    def sum_rewards(self, rewards: Sequence[float]) -> list[float]:
        """Returns the return of each turn: its reward, plus the discounted rewards of the turns after it.

        >>> CreditRule(by_turn=True, discount=0.5).sum_rewards([1.0, 0.0, 4.0])
        [2.0, 2.0, 4.0]
        """
        returns = list(rewards)
        for turn in reversed(range(len(returns) - 1)):
            returns[turn] += self.discount * returns[turn + 1]
        return returns

    def compute_returns(self, sample: Sample) -> list[float]:
        """Returns the returns of a scored sample by the task's rewards alone, before penalties of an algorithm."""
        return self.sum_rewards(self.split_reward(sample))

    def is_dead(self, group: Group) -> bool:
        """Returns whether the task's rewards tell no sample of the group from another; True if none has a reward.

        With credit per turn that must hold in every turn, among the samples that reached it.
        """
        returns = [self.compute_returns(s) for s in group.samples if s.reward is not None]
        return all(map(is_constant, collect_by_turn(returns)))


WHOLE_EPISODE = CreditRule()


def find_turns(provenance: Sequence[int]) -> list[list[int]]:
    """Returns the turns of the policy, each as the indices of its tokens: neighbours that it sampled.

    >>> find_turns([1, 1, 2, 1]), find_turns([2])
    ([[0, 1], [3]], [])
    """
    turns: list[list[int]] = []
    for place, origin in enumerate(provenance):
        if origin != Provenance.SAMPLED:
            continue
        if turns and turns[-1][-1] == place - 1:
            turns[-1].append(place)
        else:
            turns.append([place])
    return turns


def collect_by_turn(returns: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns, for each turn, the returns of the samples that reached it. `returns` has one list per sample.

    >>> collect_by_turn([[1.0, 2.0], [3.0]])
    [[1.0, 3.0], [2.0]]
    """
    num_turns = max(map(len, returns), default=0)
    return [[row[turn] for row in returns if turn < len(row)] for turn in range(num_turns)]


def estimate_by_turn(
    groups: TurnReturns, estimate: Callable[[list[list[float]]], list[list[float]]], least: int
) -> list[list[list[float]]]:
    """Returns the advantages of all turns, in the shape of `groups`: groups, samples, turns.

    `estimate` is called once per turn, with the returns of the samples that reached it, one list per group. A group of
    which fewer than `least` samples reached a turn is not among them: its advantages are 0 there.

    >>> centre = lambda rows: [[x - sum(row) / len(row) for x in row] for row in rows]
    >>> estimate_by_turn([[[1.0, 1.0], [0.0], [2.0, 3.0]], [[4.0, 5.0], [6.0]]], centre, least=2)
    [[[0.0, -1.0], [-1.0], [1.0, 1.0]], [[-1.0, 0.0], [1.0]]]
    """
    advantages = [[[0.0] * len(sample) for sample in group] for group in groups]
    for turn in range(max((len(sample) for group in groups for sample in group), default=0)):
        # (group, samples that reached the turn), where they are enough
        reached = [(g, [i for i, sample in enumerate(group) if turn < len(sample)]) for g, group in enumerate(groups)]
        compared = [(g, members) for g, members in reached if len(members) >= least]
        estimates = estimate([[groups[g][i][turn] for i in members] for g, members in compared])
        for (g, members), row in zip(compared, estimates, strict=True):
            for i, advantage in zip(members, row, strict=True):
                advantages[g][i][turn] = advantage
    return advantages


def store_advantages(sample: Sample, advantages: Sequence[float]) -> None:
    """Writes the advantages of a sample's turns, or its only one, into the sample.

    `advantage` gets the one of the largest size, the first of several. So it is 0 only if no token has an advantage.
    `token_advantages` is set where the turns differ, with 0 for tokens that the policy did not sample.
    """
    sample.advantage = max(advantages, key=abs)
    if len(set(advantages)) > 1:
        sample.token_advantages = [0.0] * len(sample.tokens)
        for turn, advantage in zip(find_turns(sample.provenance), advantages, strict=True):
            for place in turn:
                sample.token_advantages[place] = advantage
